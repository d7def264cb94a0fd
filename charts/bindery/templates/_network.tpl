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

{{/* Outgoing connections of each component, as rules of network policies. Use with fromYaml. */}}
{{- define "bindery.egress" -}}
{{- $root := . -}}
{{- $release := dict "app.kubernetes.io/name" (include "bindery.name" .) "app.kubernetes.io/instance" .Release.Name -}}
{{- $ports := dict "zookeeper" (list 2181) "bookie" (list 3181) "bookie http" (list 3181 8000) "broker" (list 8080) "auditor" (list 8090) "servers" (list 2888 3888) "driver" (list 7078 7079) "executors" (list 7079) -}}
{{- $pods := dict "bookie http" (list "bookie") "servers" (list "zookeeper") "driver" (list "audit") "executors" (list "audit-executor") -}}
{{- $tools := list "zookeeper" "bookie http" "broker" "auditor" -}}
{{- $needs := dict
  "bookie" (.Values.bookie.rack.fromNode | ternary (list "zookeeper" "bookie" "api") (list "zookeeper" "bookie"))
  "broker" (list "zookeeper" "bookie" "broker")
  "auditor" (list "zookeeper" "bookie http")
  "toolbox" $tools
-}}
{{- if .Values.zookeeper.enabled }}{{ $_ := set $needs "zookeeper" (list "servers") }}{{ end -}}
{{- if .Values.init.enabled }}{{ $_ := set $needs "init" (list "zookeeper") }}{{ end -}}
{{- if .Values.backup.enabled }}{{ $_ := set $needs "backup" (list "zookeeper") }}{{ end -}}
{{- if .Values.upgradeGate.enabled }}{{ $_ := set $needs "gate" (list "zookeeper") }}{{ end -}}
{{- if .Values.helmTest.enabled }}{{ $_ := set $needs "test" $tools }}{{ end -}}
{{- if include "bindery.secretsJob.isUsed" . }}{{ $_ := set $needs "secrets" (list "api") }}{{ end -}}
{{- if .Values.audit.enabled -}}
{{- $_ := set $needs "audit" $tools -}}
{{- if .Values.audit.executors.enabled -}}
{{- $_ := set $needs "audit" (concat $tools (list "executors" "api")) -}}
{{- $_ := set $needs "audit-executor" (concat $tools (list "driver" "executors")) -}}
{{- end -}}
{{- end -}}
{{- $result := dict -}}
{{- range $component, $targets := $needs -}}
{{- $dns := dict "ports" (list (dict "port" 53 "protocol" "UDP") (dict "port" 53 "protocol" "TCP")) -}}
{{- with $root.Values.networkPolicy.dnsServers }}{{ $_ := set $dns "to" . }}{{ end -}}
{{- $rules := list $dns -}}
{{- range $target := $targets -}}
{{- $rule := dict -}}
{{- if eq $target "api" -}}
{{- $rule = dict "ports" (list (dict "port" 443 "protocol" "TCP") (dict "port" 6443 "protocol" "TCP")) -}}
{{- with $root.Values.networkPolicy.apiServers }}{{ $_ := set $rule "to" . }}{{ end -}}
{{- else if and (eq $target "zookeeper") (not $root.Values.zookeeper.enabled) -}}
{{- $open := list -}}
{{- range $root.Values.zookeeper.external.servers }}{{ $open = append $open (dict "port" (splitList ":" . | last | int) "protocol" "TCP") }}{{ end -}}
{{- $rule = dict "ports" (uniq $open) -}}
{{- else -}}
{{- $open := list -}}
{{- range get $ports $target }}{{ $open = append $open (dict "port" . "protocol" "TCP") }}{{ end -}}
{{- $named := dict "key" "app.kubernetes.io/component" "operator" "In" "values" (get $pods $target | default (list $target)) -}}
{{- $rule = dict "ports" $open "to" (list (dict "podSelector" (dict "matchLabels" $release "matchExpressions" (list $named)))) -}}
{{- end -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- $_ := set $result $component (concat $rules $root.Values.networkPolicy.extraEgress) -}}
{{- end -}}
{{- toYaml $result }}
{{- end }}
