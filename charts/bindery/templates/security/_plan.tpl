{{/* Whether the chart's jobs create certificates, or credentials, or both. */}}
{{- define "bindery.secretsJob.isUsed" -}}
{{- $security := .Values.security -}}
{{- if and $security.enabled (or (eq $security.certificates.source "job") (eq $security.credentials.source "job")) -}}true{{- end -}}
{{- end }}

{{/* Names of the Secrets that the jobs may read and write; they have no permission for others. Use with fromYamlArray. */}}
{{- define "bindery.secretsJob.secrets" -}}
{{- $names := list (printf "%s-authority" (include "bindery.fullname" .)) -}}
{{- range $kind := list "certificates" "credentials" -}}
{{- if eq (get $.Values.security $kind).source "job" -}}
{{- range $identity := include "bindery.security.identities" $ | fromJsonArray -}}
{{- $names = append $names (include "bindery.security.secretName" (dict "root" $ "kind" $kind "identity" $identity)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $names }}
{{- end }}

{{/* What the jobs write, as the JSON that `bindery certificates kubernetes` reads. */}}
{{- define "bindery.secretsJob.plan" -}}
{{- $security := .Values.security -}}
{{- $certificates := list -}}
{{- $credentials := list -}}
{{- range $identity := include "bindery.security.identities" . | fromJsonArray -}}
{{- $names := list -}}
{{- if ne $identity "operator" -}}{{- $names = include "bindery.security.names" (dict "root" $ "component" $identity) | fromYamlArray -}}{{- end -}}
{{- $role := eq $identity "operator" | ternary (first $security.superUserRoles) $identity -}}
{{- if eq $security.certificates.source "job" -}}
{{- $certificates = append $certificates (dict "secret" (include "bindery.security.secretName" (dict "root" $ "kind" "certificates" "identity" $identity)) "names" $names) -}}
{{- end -}}
{{- if eq $security.credentials.source "job" -}}
{{- $credentials = append $credentials (dict "secret" (include "bindery.security.secretName" (dict "root" $ "kind" "credentials" "identity" $identity)) "role" $role) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict
  "namespace" .Release.Namespace
  "authority" (printf "%s-authority" (include "bindery.fullname" .))
  "days" (int $security.certificates.days)
  "certificates" $certificates
  "credentials" $credentials) }}
{{- end }}

{{/* Takes (dict "root" $ "args" (list "--rotate")). */}}
{{- define "bindery.secretsJob.container" -}}
args: {{ concat (list "certificates" "kubernetes" (printf "--settle=%d" (int .root.Values.secretsJob.settleSeconds))) .args | toJson }}
env:
  - name: BINDERY_SECRETS_PLAN
    value: {{ include "bindery.secretsJob.plan" .root | quote }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
{{- end }}
