{{- define "bindery.init.container" -}}
args: [cluster, init]
env:
  {{- include "bindery.toolEnv" . | nindent 2 }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
{{- end }}

{{/* The gate before an upgrade or a rollback. A rollback may be the remedy for an upgrade that lost a bookie, so its gate
checks only whether a ledger names a bookie that would be removed. The values of a rollback are those of the older revision:
`upgradeGate.force` among them is ignored, and the present number of bookies is read from the ConfigMap, which belongs to the
present revision until the gate has passed. Takes (dict "root" $ "hook" "pre-upgrade"). */}}
{{- define "bindery.gate.container" -}}
{{- $values := .root.Values -}}
{{- $bookie := printf "%s-bookie" (include "bindery.fullname" .root) -}}
args:
  - recovery
  - gate
  - --bookies={{ int $values.bookie.replicas }}
  - --id-template={{ $bookie }}-{}.{{ $bookie }}
  - --wait={{ int $values.upgradeGate.waitSeconds }}s
  {{- if eq .hook "pre-rollback" }}
  - --only-drained
  {{- else if $values.upgradeGate.force }}
  - --force
  {{- end }}
env:
  {{- include "bindery.toolEnv" .root | nindent 2 }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
  {{- if eq .hook "pre-rollback" }}
  - name: BINDERY_BOOKIES_NOW
    valueFrom:
      configMapKeyRef:
        name: {{ $bookie | quote }}
        key: replicas
        optional: true
  {{- end }}
{{- end }}
