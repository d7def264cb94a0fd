{{- define "bindery.broker.container" -}}
ports:
  - {name: http, containerPort: 8080}
env:
  {{- include "bindery.serviceEnv" (dict "root" . "prefix" "BROKER_") | nindent 2 }}
  # URL of this broker for other brokers, which forward requests for topics that this one owns.
  - name: BROKER_ADVERTISED_URL
    value: {{ include "bindery.scheme" (dict "root" . "component" "broker") }}://$(POD_IP):8080
  {{- include "bindery.configEnv" (dict "prefix" "BROKER_" "config" (include "bindery.config" (dict "root" . "component" "broker") | fromYaml)) | nindent 2 }}
lifecycle:
  preStop:
    # The pod is removed from the endpoints of the service before the broker hands its bundles over. It answers until
    # that is done (config.stopTimeoutS), within terminationGracePeriodSeconds.
    exec:
      command: [sleep, "3"]
{{- end }}
