{{/* Environment variables with the addresses of the cluster, for the `bindery` command. */}}
{{- define "bindery.toolEnv" -}}
- name: BINDERY_ZOOKEEPER
  value: {{ include "bindery.zookeeperServers" . | quote }}
- name: BINDERY_URL
  value: {{ include "bindery.brokerUrl" . }}
{{- include "bindery.security.toolEnv" . }}
{{- end }}

{{- define "bindery.toolbox.container" -}}
command: [sleep, infinity]
env:
  {{- include "bindery.toolEnv" . | nindent 2 }}
  {{- include "bindery.adminToken.env" (dict "root" . "variable" "BINDERY_BOOKIE_TOKEN_FILE") | indent 2 }}
{{- with include "bindery.adminToken.mount" . | trim }}
volumeMounts:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}
