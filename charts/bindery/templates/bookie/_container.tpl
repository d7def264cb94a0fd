{{/* The claims of a bookie: the one common, or journal and ledgers apart. Use with fromYaml. */}}
{{- define "bindery.bookie.claims" -}}
{{- $persistence := .Values.bookie.persistence -}}
{{- if $persistence.common.enabled -}}
{{- toYaml (dict "data" $persistence.common) }}
{{- else -}}
{{- toYaml (dict "journal" $persistence.journal "ledgers" $persistence.ledgers) }}
{{- end }}
{{- end }}

{{- define "bindery.bookie.container" -}}
{{- $service := printf "%s-bookie" (include "bindery.fullname" .) -}}
ports:
  - {name: ledger, containerPort: 3181}
  - {name: http, containerPort: 8000}
env:
  {{- include "bindery.serviceEnv" (dict "root" . "prefix" "BOOKIE_") | nindent 2 }}
  # Who this bookie is, for good: its ordinal's name, without an address, the namespace or the cluster's domain, so that
  # its disks may move to another namespace or cluster.
  - name: BOOKIE_BOOKIE_ID
    value: $(POD_NAME).{{ $service }}
  - name: BOOKIE_ADVERTISED_HOST
    value: $(POD_NAME).{{ $service }}.$(POD_NAMESPACE).svc.{{ .Values.clusterDomain }}
  - name: BOOKIE_JOURNAL_DIR
    value: /data/journal
  - name: BOOKIE_LEDGER_DIR
    value: /data/ledgers
  {{- include "bindery.configEnv" (dict "prefix" "BOOKIE_" "config" .Values.bookie.config) | nindent 2 }}
lifecycle:
  preStop:
    # Tells the auditors that this bookie will be back, so that nothing is copied for a restart.
    exec:
      command: [bindery-bookie-prestop]
volumeMounts:
  {{- if .Values.bookie.persistence.common.enabled }}
  - {name: data, mountPath: /data}
  {{- else }}
  - {name: journal, mountPath: /data/journal}
  - {name: ledgers, mountPath: /data/ledgers}
  {{- end }}
{{- end }}

{{- define "bindery.bookie.volumes" -}}
{{- if not .Values.bookie.persistence.enabled }}
{{- range $name, $claim := include "bindery.bookie.claims" . | fromYaml }}
{{ include "bindery.emptyDir" (dict "name" $name "claim" $claim) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "bindery.bookie.probes" -}}
# Up to half an hour: a start replays the journal first and reports its progress.
startup:
  httpGet: {path: /startupz, port: http}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 600
# Whether the process works at all; never whether ZooKeeper does.
liveness:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readiness:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}
