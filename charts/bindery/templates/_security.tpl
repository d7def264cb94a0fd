{{/*
The secure form: TLS on the ports of the services, tokens, authorization, the audit log, and credentials of ZooKeeper.
Every pod mounts the files of its own identity in one directory, in which Kubernetes replaces all of them at once:

| file             | in the Secret of | content                                             | pods                    |
|------------------|------------------|-----------------------------------------------------|-------------------------|
| tls.crt, tls.key | certificates     | the certificate of the service and its key          | the services            |
| ca.crt           | certificates     | the authorities that all of them trust              | all                     |
| keys             | credentials      | public keys that verify tokens                      | the services            |
| token            | credentials      | the pod's own token                                 | all                     |
| zookeeper        | credentials      | user and password for ZooKeeper                     | all                     |
*/}}

{{- define "bindery.security.directory" -}}
/etc/bindery/secure
{{- end }}

{{/* The identity of a component: that of a service, `operator` for programs that act for operators, or empty. */}}
{{- define "bindery.security.identity" -}}
{{- if has . (list "bookie" "broker" "auditor") -}}{{ . }}
{{- else if has . (list "toolbox" "init" "gate" "test" "audit" "audit-executor" "backup") -}}operator
{{- end -}}
{{- end }}

{{- define "bindery.security.identities" -}}
{{ list "bookie" "broker" "auditor" "operator" | toJson }}
{{- end }}

{{/* Name of a Secret. Takes (dict "root" $ "kind" "certificates" "identity" "broker"); kind: certificates or credentials. */}}
{{- define "bindery.security.secretName" -}}
{{- $values := get .root.Values.security .kind -}}
{{- $own := printf "%s-%s-%s" (include "bindery.fullname" .root) .identity (eq .kind "certificates" | ternary "tls" "credentials") -}}
{{- if eq $values.source "secrets" -}}{{ get $values.secretNames .identity }}{{- else -}}{{ $own }}{{- end -}}
{{- end }}

{{/* The volume of an identity. Takes (dict "root" $ "component" "broker"); empty if the component has no identity. */}}
{{- define "bindery.security.volume" -}}
{{- $identity := include "bindery.security.identity" .component -}}
{{- if and .root.Values.security.enabled $identity -}}
{{- $isService := ne $identity "operator" -}}
- name: secure
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "bindery.security.secretName" (dict "root" .root "kind" "certificates" "identity" $identity) | quote }}
          items:
            - {key: ca.crt, path: ca.crt}
            {{- if $isService }}
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- end }}
      - secret:
          name: {{ include "bindery.security.secretName" (dict "root" .root "kind" "credentials" "identity" $identity) | quote }}
          items:
            - {key: token, path: token}
            - {key: zookeeper, path: zookeeper}
            {{- if $isService }}
            - {key: keys, path: keys}
            {{- end }}
{{- end }}
{{- end }}

{{/* The mount of that volume, as a list. Takes the same. */}}
{{- define "bindery.security.mount" -}}
{{- if and .root.Values.security.enabled (include "bindery.security.identity" .component) -}}
- {name: secure, mountPath: {{ include "bindery.security.directory" . }}, readOnly: true}
{{- end }}
{{- end }}

{{/* The settings of a service: those of the secure form, overridden by its `config`.
Takes (dict "root" $ "component" "bookie"); use with fromYaml. */}}
{{- define "bindery.config" -}}
{{- $config := (get .root.Values .component).config -}}
{{- if .root.Values.security.enabled -}}
{{- $secure := include (printf "bindery.security.%s" .component) .root | fromYaml -}}
{{- include "bindery.over" (dict "lower" $secure "upper" $config) }}
{{- else -}}
{{- toYaml $config }}
{{- end -}}
{{- end }}

{{/* Maps merged, the upper one with precedence, also if its value is false or empty: `mergeOverwrite` would ignore that. */}}
{{- define "bindery.over" -}}
{{- $merged := deepCopy .lower -}}
{{- range $key, $value := .upper -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $key)) -}}
{{- $value = include "bindery.over" (dict "lower" (get $merged $key) "upper" $value) | fromYaml -}}
{{- end -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- toYaml $merged }}
{{- end }}

{{/* Roles that may do everything, separated by commas. */}}
{{- define "bindery.security.superUsers" -}}
{{- join "," (uniq .Values.security.superUserRoles) }}
{{- end }}

{{- define "bindery.security.shared" -}}
{{- $at := include "bindery.security.directory" . -}}
http:
  tls: {certificateFile: {{ $at }}/tls.crt, keyFile: {{ $at }}/tls.key}
auditLog: {file: "-"}
zookeeperAccess: {credentialsFile: {{ $at }}/zookeeper, newNodes: creator}
{{- end }}

{{- define "bindery.security.bookie" -}}
{{- $at := include "bindery.security.directory" . -}}
{{- $operators := include "bindery.security.superUsers" . -}}
{{ include "bindery.security.shared" . }}
tls: {required: true, certificateFile: {{ $at }}/tls.crt, keyFile: {{ $at }}/tls.key, caFile: {{ $at }}/ca.crt}
auth:
  provider: token
  keysFile: {{ $at }}/keys
  clientRoles: {{ printf "broker,auditor,bookie,%s" $operators | quote }}
  recoveryRoles: {{ printf "auditor,bookie,%s" $operators | quote }}
  adminRoles: {{ $operators | quote }}
repair: {tokenFile: {{ $at }}/token, caFile: {{ $at }}/ca.crt}
admin: {keysFile: {{ $at }}/keys}
{{- end }}

{{- define "bindery.security.broker" -}}
{{- $at := include "bindery.security.directory" . -}}
{{ include "bindery.security.shared" . }}
auth: {tokensKeysFile: {{ $at }}/keys, proxyRoles: broker, brokerTokenFile: {{ $at }}/token}
authorization:
  enabled: true
  superUserRoles: {{ printf "broker,%s" (include "bindery.security.superUsers" .) | quote }}
peers: {caFile: {{ $at }}/ca.crt, serverName: {{ printf "%s-broker" (include "bindery.fullname" .) }}}
client: {tokenFile: {{ $at }}/token, caFile: {{ $at }}/ca.crt}
{{- end }}

{{- define "bindery.security.auditor" -}}
{{- $at := include "bindery.security.directory" . -}}
{{- $operators := include "bindery.security.superUsers" . -}}
{{ include "bindery.security.shared" . }}
admin: {keysFile: {{ $at }}/keys, operatorRoles: {{ $operators | quote }}, readerRoles: {{ $operators | quote }}}
client: {tokenFile: {{ $at }}/token, caFile: {{ $at }}/ca.crt}
{{- end }}

{{/* Environment variables with credentials for the `bindery` command and for audits. */}}
{{- define "bindery.security.toolEnv" -}}
{{- if .Values.security.enabled }}
{{- $at := include "bindery.security.directory" . }}
{{- range $name, $file := dict
  "BINDERY_BOOKIE_TOKEN_FILE" "token"
  "BINDERY_CLIENT_CA_FILE" "ca.crt"
  "BINDERY_CLIENT_TOKEN_FILE" "token"
  "BINDERY_HTTP_CA_FILE" "ca.crt"
  "BINDERY_TOKEN_FILE" "token"
  "BINDERY_ZOOKEEPER_CREDENTIALS_FILE" "zookeeper"
}}
- name: {{ $name }}
  value: {{ $at }}/{{ $file }}
{{- end }}
- name: BINDERY_ZOOKEEPER_NEW_NODES
  value: creator
{{- end }}
{{- end }}

{{/* `https` if the HTTP port of a service has TLS, otherwise `http`. Takes (dict "root" $ "component" "broker"). */}}
{{- define "bindery.scheme" -}}
{{- $file := dig "http" "tls" "certificateFile" "" (include "bindery.config" . | fromYaml) -}}
{{- $variable := printf "%s_HTTP_TLS_CERTIFICATE_FILE" (upper .component) -}}
{{- if or $file (has $variable (include "bindery.variables" . | fromYamlArray)) -}}https{{- else -}}http{{- end -}}
{{- end }}

{{/* DNS names in the certificate of a service. Takes (dict "root" $ "component" "broker"); use with fromYamlArray. */}}
{{- define "bindery.security.names" -}}
{{- $service := printf "%s-%s" (include "bindery.fullname" .root) .component -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $names := list -}}
{{- range $name := list $service (printf "%s.%s" $service $namespace) (printf "%s.%s.svc" $service $namespace) (printf "%s.%s.svc.%s" $service $namespace .root.Values.clusterDomain) -}}
{{- $names = append $names $name -}}
{{- if eq $.component "bookie" -}}{{- $names = append $names (printf "*.%s" $name) -}}{{- end -}}
{{- end -}}
{{- $names = concat $names (list "localhost" (include "bindery.security.metricsName" .root)) -}}
{{- if eq .component "broker" -}}
{{- $names = concat $names .root.Values.security.certificates.brokerNames -}}
{{- if .root.Values.broker.ingress.enabled -}}{{- $names = concat $names .root.Values.broker.ingress.hosts -}}{{- end -}}
{{- if .root.Values.broker.httpRoute.enabled -}}{{- $names = concat $names .root.Values.broker.httpRoute.hosts -}}{{- end -}}
{{- end -}}
{{- toYaml (uniq $names) }}
{{- end }}

{{/* A name that all certificates contain, for clients that reach pods by their addresses, such as Prometheus. */}}
{{- define "bindery.security.metricsName" -}}
{{- printf "metrics.%s.%s" (include "bindery.fullname" .) .Release.Namespace }}
{{- end }}
