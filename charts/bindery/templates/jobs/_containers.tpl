{{- define "bindery.init.container" -}}
args: [cluster, init]
env:
  {{- include "bindery.toolEnv" . | nindent 2 }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
{{- end }}

{{- define "bindery.gate.container" -}}
{{- $bookie := printf "%s-bookie" (include "bindery.fullname" .) -}}
args:
  - recovery
  - gate
  - --bookies={{ int .Values.bookie.replicas }}
  - --id-template={{ $bookie }}-{}.{{ $bookie }}
  - --wait={{ int .Values.upgradeGate.waitSeconds }}s
  {{- if .Values.upgradeGate.force }}
  - --force
  {{- end }}
env:
  {{- include "bindery.toolEnv" . | nindent 2 }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
{{- end }}
