{{- define "bindery.auditor.container" -}}
ports:
  - {name: http, containerPort: 8090}
env:
  {{- include "bindery.serviceEnv" (dict "root" . "prefix" "AUDITOR_") | nindent 2 }}
  # Who this is in the election and in locks; no two are called the same.
  - name: AUDITOR_NAME
    value: $(POD_NAME)
  {{- include "bindery.configEnv" (dict "prefix" "AUDITOR_" "config" .Values.auditor.config) | nindent 2 }}
lifecycle:
  preStop:
    # The service's endpoints lose this pod before it stops listening.
    exec:
      command: [sleep, "3"]
{{- end }}
