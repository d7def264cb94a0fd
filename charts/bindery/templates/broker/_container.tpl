{{- define "bindery.broker.container" -}}
ports:
  - {name: http, containerPort: 8080}
env:
  {{- include "bindery.serviceEnv" (dict "root" . "prefix" "BROKER_") | nindent 2 }}
  # Where other brokers reach this one: they pass on requests for topics that it owns.
  - name: BROKER_ADVERTISED_URL
    value: http://$(POD_IP):8080
  {{- include "bindery.configEnv" (dict "prefix" "BROKER_" "config" .Values.broker.config) | nindent 2 }}
lifecycle:
  preStop:
    # The service's endpoints lose this pod before it stops listening.
    exec:
      command: [sleep, "3"]
{{- end }}
