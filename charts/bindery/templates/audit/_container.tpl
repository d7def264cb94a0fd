{{- define "bindery.audit.directory" -}}
/var/lib/bindery/audits
{{- end }}

{{- define "bindery.audit.claim" -}}
{{- default (printf "%s-audit" (include "bindery.fullname" .)) .Values.audit.persistence.existingClaim }}
{{- end }}

{{/* The volume with the reports, for the driver, the executors and the pods that show reports. */}}
{{- define "bindery.audit.volumes" -}}
{{- if .Values.audit.persistence.enabled -}}
- name: audits
  persistentVolumeClaim:
    claimName: {{ include "bindery.audit.claim" . }}
{{- else -}}
{{- include "bindery.emptyDir" (dict "name" "audits" "claim" .Values.audit.persistence) }}
{{- end }}
{{- end }}

{{/* The size of a heap in Java's format, such as 640m. */}}
{{- define "bindery.audit.heap" -}}
{{- div (include "bindery.bytes" . | int64) 1048576 }}m
{{- end }}

{{/* Spark's settings as a JSON object. Kubernetes replaces $(POD_IP) and similar variables.

| port | of             | purpose                                                                                     |
|------|----------------|---------------------------------------------------------------------------------------------|
| 7078 | driver         | connections from executors                                                                  |
| 7079 | both           | exchange of blocks                                                                          |

Spark creates neither a Service for the driver nor a ConfigMap for executors, so the driver needs permissions only for pods. */}}
{{- define "bindery.audit.sparkConf" -}}
{{- $audit := .Values.audit -}}
{{- $conf := dict "spark.driver.memory" (include "bindery.audit.heap" $audit.heapSize) -}}
{{- if $audit.executors.enabled -}}
{{- $workload := include "bindery.workload" (dict "root" . "component" "audit") | fromYaml -}}
{{- $conf = merge $conf (dict
  "spark.master" "k8s://https://kubernetes.default.svc:443"
  "spark.driver.host" "$(POD_IP)"
  "spark.driver.bindAddress" "$(POD_IP)"
  "spark.driver.port" "7078"
  "spark.blockManager.port" "7079"
  "spark.authenticate" "true"
  "spark.network.crypto.enabled" "true"
  "spark.executor.instances" (toString $audit.executors.instances)
  "spark.executor.cores" (toString $audit.executors.cores)
  "spark.executor.memory" (include "bindery.audit.heap" $audit.executors.heapSize)
  "spark.executor.memoryOverhead" (include "bindery.audit.heap" $audit.executors.memoryOverhead)
  "spark.executor.extraJavaOptions" "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
  "spark.shuffle.io.connectionCreationTimeout" "20s"
  "spark.kubernetes.executor.request.cores" (toString $audit.executors.requestCpu)
  "spark.kubernetes.namespace" .Release.Namespace
  "spark.kubernetes.container.image" (include "bindery.image" (dict "root" . "image" $workload.image))
  "spark.kubernetes.container.image.pullPolicy" $workload.image.pullPolicy
  "spark.kubernetes.driver.pod.name" "$(POD_NAME)"
  "spark.kubernetes.executor.podNamePrefix" "$(POD_NAME)"
  "spark.kubernetes.authenticate.executor.serviceAccountName" (include "bindery.serviceAccountName" (dict "root" . "component" "audit-executor"))
  "spark.kubernetes.executor.podTemplateFile" "/etc/bindery/spark/executor.yaml"
  "spark.kubernetes.executor.disableConfigMap" "true"
  "spark.kubernetes.driver.service.deleteOnTermination" "false"
  "spark.kubernetes.driver.ownPersistentVolumeClaim" "false"
  "spark.kubernetes.driver.reusePersistentVolumeClaim" "false"
) -}}
{{- with dig "limits" "cpu" "" (default dict $workload.resources) -}}
{{- $_ := set $conf "spark.kubernetes.executor.limit.cores" (toString .) -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite $conf (deepCopy $audit.sparkConf) | toJson }}
{{- end }}

{{- define "bindery.audit.container" -}}
{{- $audit := .Values.audit -}}
args:
  - scheduled
  - --level={{ $audit.level }}
  - --rate={{ $audit.rate }}
  - --cores={{ int $audit.cores }}
  {{- with $audit.sinceVerified }}
  - --since-verified={{ . }}
  {{- end }}
  {{- if $audit.apply }}
  - --apply
  - --yes
  {{- end }}
  {{- with $audit.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  # The run is named after the Job, so the next pod of the Job resumes it.
  - name: BINDERY_AUDIT_JOB
    valueFrom:
      fieldRef:
        fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
  - name: BINDERY_AUDIT_KEEP
    value: {{ int $audit.keepRuns | quote }}
  - name: BINDERY_SPARK_CONF
    value: {{ include "bindery.audit.sparkConf" . | quote }}
  {{- include "bindery.audit.env" . | nindent 2 }}
{{- if $audit.executors.enabled }}
ports:
  - {name: driver, containerPort: 7078}
  - {name: blocks, containerPort: 7079}
{{- end }}
volumeMounts:
  - {name: audits, mountPath: {{ include "bindery.audit.directory" . }}}
  {{- if $audit.executors.enabled }}
  - {name: executors, mountPath: /etc/bindery/spark, readOnly: true}
  {{- end }}
{{- end }}

{{- define "bindery.audit.env" -}}
- name: BINDERY_ZOOKEEPER
  value: {{ include "bindery.zookeeperServers" . | quote }}
- name: BINDERY_AUDIT_OUT
  value: {{ include "bindery.audit.directory" . }}
{{- include "bindery.security.toolEnv" . }}
{{- end }}

{{- define "bindery.audit.listContainer" -}}
args: [show]
env:
  {{- include "bindery.audit.env" . | nindent 2 }}
volumeMounts:
  - {name: audits, mountPath: {{ include "bindery.audit.directory" . }}}
{{- end }}

{{/* The container that waits while an operator reads the reports. */}}
{{- define "bindery.audit.reportsContainer" -}}
command: [sleep, "3600"]
env:
  {{- include "bindery.audit.env" . | nindent 2 }}
volumeMounts:
  - {name: audits, mountPath: {{ include "bindery.audit.directory" . }}}
{{- end }}

{{/* Resources of an executor's container other than CPU and memory, such as ephemeral storage. Spark adds CPU and memory
from its settings. */}}
{{- define "bindery.audit.executorResources" -}}
{{- $result := dict -}}
{{- range $kind, $amounts := pick (default dict (include "bindery.workload" (dict "root" . "component" "audit") | fromYaml).resources) "requests" "limits" -}}
{{- with omit (default dict $amounts) "cpu" "memory" -}}{{- $_ := set $result $kind . -}}{{- end -}}
{{- end -}}
{{- toYaml $result }}
{{- end }}

{{/* Spark adds the argument `executor`, ports, CPU, memory and variables. */}}
{{- define "bindery.audit.executorContainer" -}}
env:
  {{- include "bindery.audit.env" . | nindent 2 }}
volumeMounts:
  - {name: audits, mountPath: {{ include "bindery.audit.directory" . }}}
{{- end }}

{{/* Executors write files of the run too. If only one node can mount the claim, they run on the driver's node. */}}
{{- define "bindery.audit.executorAffinity" -}}
{{- if not (has "ReadWriteMany" .Values.audit.persistence.accessModes) -}}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "bindery.selectorLabels" (dict "root" . "component" "audit") | nindent 10 }}
{{- end }}
{{- end }}

{{/* The pod from which Spark creates the pods of executors. */}}
{{- define "bindery.audit.executorPod" -}}
{{- $context := dict "root" . "component" "audit" }}
{{- $template := include "bindery.podTemplate" (dict "root" . "component" "audit-executor"
      "container" (include "bindery.audit.executorContainer" .)
      "volumes" (include "bindery.audit.volumes" .)) | fromYaml }}
{{- $spec := omit $template.spec "automountServiceAccountToken" }}
{{- /* Executors do not use the Kubernetes API: their account has no permissions, and they do not get its token. */}}
{{- $account := include "bindery.serviceAccountName" (dict "root" . "component" "audit-executor") }}
{{- $_ := set $spec "serviceAccountName" $account }}
{{- $_ := set $spec "automountServiceAccountToken" false }}
{{- $_ := set $spec "restartPolicy" "Never" }}
{{- $container := omit (first $spec.containers) "resources" }}
{{- with include "bindery.audit.executorResources" . | fromYaml }}
{{- $_ := set $container "resources" . }}
{{- end }}
{{- $_ := set $spec "containers" (prepend (rest $spec.containers) $container) }}
{{- with include "bindery.audit.executorAffinity" . }}
{{- /* All executors must run on one node. Anti-affinity or a spread over zones would prevent all but one from starting. */}}
{{- $w := include "bindery.workload" $context | fromYaml }}
{{- $affinity := $w.affinity | empty | ternary dict (default dict $spec.affinity) }}
{{- $_ := set $spec "affinity" (mergeOverwrite $affinity (fromYaml .)) }}
{{- if empty $w.topologySpreadConstraints }}{{ $spec = omit $spec "topologySpreadConstraints" }}{{ end }}
{{- end }}
{{- toYaml (dict "apiVersion" "v1" "kind" "Pod" "metadata" $template.metadata "spec" $spec) }}
{{- end }}
