{{/* Groups of this release's pods as peers of network policies: `all`; `storage`, which read and write entries;
`zookeeper`; and `spark`, the driver and the executors of audits. Use with fromYaml. */}}
{{- define "bindery.policyPeers" -}}
{{- $release := dict "app.kubernetes.io/name" (include "bindery.name" .) "app.kubernetes.io/instance" .Release.Name -}}
{{- $component := "app.kubernetes.io/component" -}}
{{- $storage := dict "key" $component "operator" "In" "values" (list "broker" "auditor" "toolbox" "bookie" "test" "audit" "audit-executor") -}}
all:
  - podSelector:
      matchLabels: {{ toJson $release }}
storage:
  - podSelector:
      matchLabels: {{ toJson $release }}
      matchExpressions: {{ list $storage | toJson }}
zookeeper:
  - podSelector:
      matchLabels: {{ toJson (merge (dict $component "zookeeper") $release) }}
spark:
  - podSelector:
      matchLabels: {{ toJson $release }}
      matchExpressions: {{ list (dict "key" $component "operator" "In" "values" (list "audit" "audit-executor")) | toJson }}
{{- end }}
