{{/*
What the notes say about access: what is open with these values, what is refused, and the values that change it.
*/}}

{{/* What every client that can connect may do without credentials. Use with fromYaml, key `open`. */}}
{{- define "bindery.notes.open" -}}
{{- $bookie := include "bindery.config" (dict "root" . "component" "bookie") | fromYaml -}}
{{- $provider := dig "auth" "provider" "none" $bookie | default "none" -}}
{{- $hasTokens := include "bindery.hasAdminTokens" (dict "root" . "service" "bookie") -}}
open:
  {{- if not (include "bindery.authenticates" (dict "root" . "prefix" "BROKER_")) }}
  - "port 8080 of brokers: read, write and delete every topic"
  {{- end }}
  {{- if eq $provider "none" }}
  - "port 3181 of bookies: read and write every ledger"
  {{- if not $hasTokens }}
  - "port 8000 of bookies: read entries; make a bookie read-only, compact or verify its disks"
  {{- end }}
  {{- end }}
  {{- $readers := dig "admin" "readerRoles" "*" (include "bindery.config" (dict "root" . "component" "auditor") | fromYaml) }}
  {{- if eq $readers "*" }}
  - "port 8000 of bookies, 8090 of auditors: read the state of ledgers, bookies and recovery"
  {{- else }}
  - "port 8000 of bookies: read the state of ledgers and bookies"
  {{- end }}
  {{- if .Values.security.enabled }}
  - "ZooKeeper: create nodes at the top, and see the names of trees; the metadata needs the password"
  {{- else if .Values.zookeeper.enabled }}
  - "port 2181 of ZooKeeper: read, change and delete the metadata of every ledger and topic"
  {{- else }}
  - "your ZooKeeper, unless you restrict it: read, change and delete the metadata of every ledger and topic"
  {{- end }}
{{- end }}

{{/* Not empty if a service has tokens of operators. Takes (dict "root" $ "service" "bookie"). */}}
{{- define "bindery.hasAdminTokens" -}}
{{- $admin := default dict (include "bindery.config" (dict "root" .root "component" .service) | fromYaml).admin -}}
{{- if or .root.Values.adminToken.secretName $admin.tokenFile $admin.keysFile -}}true{{- end -}}
{{- end }}

{{- define "bindery.notes.access" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $provider := dig "auth" "provider" "none" (include "bindery.config" (dict "root" . "component" "bookie") | fromYaml) | default "none" -}}
{{- $without := list -}}
{{- range list "bookie" "auditor" -}}
{{- if not (include "bindery.hasAdminTokens" (dict "root" $ "service" .)) -}}{{- $without = append $without (printf "%ss" .) -}}{{- end -}}
{{- end -}}
{{- $set := list }}

{{ if not $policy.enabled -}}
Access: every pod of the Kubernetes cluster can connect to every port, and may without credentials:
{{- else if $policy.allowBrokerClients -}}
Access: the pods of this release, and those that networkPolicy.allow... names, may without credentials:
{{- else -}}
Access: the pods of this release, those that networkPolicy.allow... names, and every client of brokers, may without credentials:
{{- end }}
{{- range (include "bindery.notes.open" . | fromYaml).open }}
  - {{ . }}
{{- end }}
{{- with $without }}
The HTTP of {{ join " and " . }} refuses changes of the whole cluster (pausing recovery, decommissioning bookies, deleting ledgers),
because no tokens of operators are configured. `bindery recovery` in the toolbox uses ZooKeeper and needs none.
{{- end }}
{{- if not $policy.enabled }}
{{- $set = append $set "--set networkPolicy.enabled=true" }}
{{- end }}
{{- if not $policy.allowBrokerClients }}
{{- $set = append $set "--set-json 'networkPolicy.allowBrokerClients=[{\"podSelector\":{\"matchLabels\":{\"app\":\"YOUR-CLIENT\"}}}]'" }}
{{- end }}
{{- if $without }}
{{- $set = append $set (printf "--set adminToken.secretName=%s-admin" (include "bindery.fullname" .)) }}
{{- end }}
{{- if or $set (eq $provider "none") }}
To close this:
{{- if $without }}
  kubectl -n {{ .Release.Namespace }} create secret generic {{ include "bindery.fullname" . }}-admin --from-literal=token="$(openssl rand -hex 32)"
{{- end }}
{{- if $set }}
  helm upgrade {{ .Release.Name }} charts/bindery -n {{ .Release.Namespace }} --reset-then-reuse-values {{ join " " $set }}
{{- end }}
{{- if eq $provider "none" }}
Tokens or certificates for port 3181, and TLS: bookie.config.auth.provider, bookie.config.tls.required, and the clients' credentials;
docs/kubernetes.md#authentication-of-bookies has the complete values. Enable them before the first install.
{{- end }}
{{- end }}
docs/security.md describes each port, and what remains open.
{{- end }}
