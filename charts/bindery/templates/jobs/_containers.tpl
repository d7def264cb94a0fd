{{- define "bindery.init.container" -}}
args: [cluster, init]
env:
  {{- include "bindery.toolEnv" . | nindent 2 }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
{{- end }}

{{/* A rollback is the cure of an upgrade that lost a bookie, so it is asked one thing: whether a ledger names those that go
with it. Its values are those of then, so `upgradeGate.force` among them means nothing, and how many bookies there are now
it has from the ConfigMap, which is the present revision's until the gate has passed. Takes (dict "root" $ "hook" "pre-upgrade"). */}}
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
