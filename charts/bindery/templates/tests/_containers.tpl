{{/* One pod that `helm test` runs. Takes (dict "root" $ "test" "roundtrip" "env" text). */}}
{{- define "bindery.testPod" -}}
{{- $context := dict "root" .root "component" "test" -}}
{{- $container := printf "command: [python, /tests/%s.py]\nenv:\n%s\nvolumeMounts:\n  - {name: tests, mountPath: /tests, readOnly: true}" .test (.env | indent 2) -}}
{{- $template := include "bindery.podTemplate" (dict "root" .root "component" "test"
      "container" $container
      "volumes" (printf "- name: tests\n  configMap:\n    name: %s-tests" (include "bindery.fullname" .root))
      "pod" "restartPolicy: Never") | fromYaml -}}
{{- $hook := dict "helm.sh/hook" "test" "helm.sh/hook-delete-policy" "before-hook-creation" -}}
apiVersion: v1
kind: Pod
metadata:
  {{- include "bindery.metadata" (merge (dict "name" (printf "%s-test-%s" (include "bindery.fullname" .root) .test) "labels" $template.metadata.labels "annotations" (merge $hook (default dict $template.metadata.annotations))) $context) | nindent 2 }}
spec:
  {{- toYaml $template.spec | nindent 2 }}
{{- end }}

{{- define "bindery.test.roundtripEnv" -}}
{{- include "bindery.toolEnv" . }}
- name: MESSAGES
  value: {{ int .Values.helmTest.messages | quote }}
- name: COPIES
  value: {{ int .Values.broker.config.ledger.writeQuorum | quote }}
{{- end }}

{{- define "bindery.test.prestopEnv" -}}
{{- $bookie := printf "%s-bookie" (include "bindery.fullname" .) -}}
{{- include "bindery.toolEnv" . }}
- name: BOOKIE_BOOKIE_ID
  value: {{ printf "%s-%d.%s" $bookie (sub .Values.bookie.replicas 1) $bookie }}
- name: BOOKIE_ZOOKEEPER
  value: {{ include "bindery.zookeeperServers" . | quote }}
- name: BOOKIE_MAINTENANCE_S
  value: "60"
{{- $access := default dict (include "bindery.config" (dict "root" . "component" "bookie") | fromYaml).zookeeperAccess }}
{{- include "bindery.configEnv" (dict "prefix" "BOOKIE_ZOOKEEPER_ACCESS_" "config" $access) }}
{{- end }}
