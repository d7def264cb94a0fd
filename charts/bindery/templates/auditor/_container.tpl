{{- define "bindery.auditor.container" -}}
ports:
  - {name: http, containerPort: 8090}
env:
  {{- include "bindery.serviceEnv" (dict "root" . "prefix" "AUDITOR_") | nindent 2 }}
  # Name of this auditor in the election and in locks. It must be unique.
  - name: AUDITOR_NAME
    value: $(POD_NAME)
  {{- include "bindery.adminToken.env" (dict "root" . "variable" "AUDITOR_ADMIN_TOKEN_FILE") | indent 2 }}
  {{- include "bindery.configEnv" (dict "prefix" "AUDITOR_" "config" (include "bindery.config" (dict "root" . "component" "auditor") | fromYaml)) | nindent 2 }}
lifecycle:
  preStop:
    # The pod is removed from the endpoints of the service before the process stops listening.
    exec:
      command: [sleep, "3"]
{{- with include "bindery.adminToken.mount" . | trim }}
volumeMounts:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}
