{{/*
The pod template that all workloads share. A workload's own file says what only it knows: its container's ports,
command, environment, hooks, probes and mounts, and the volumes behind them. Everything that an operator may turn for
any workload is added here, once.
*/}}

{{/* Takes a dict:
  root       the root context
  token      whether the pod gets a token for the Kubernetes API whatever the values say; may be left out
  component  the key of the workload in the values; also the name of its container
  container  text: the workload's own members of the container, as YAML
  volumes    text: a list of volumes, as YAML; may be empty
  checksum   text whose change restarts the pods: what a ConfigMap holds; may be empty
  probes     dict of startup, liveness, readiness: each a dict with the handler and the defaults of this workload
  pod        text: the workload's own members of the pod's spec, as YAML; may be empty
*/}}
{{- define "bindery.podTemplate" -}}
{{- $context := dict "root" .root "component" .component -}}
{{- $workload := include "bindery.workload" $context | fromYaml -}}
{{- $template := include "bindery.podTemplate.text" (merge (dict "workload" $workload) .) -}}
{{- $parsed := fromYaml $template -}}
{{- if hasKey $parsed "Error" -}}
{{- fail (printf "the pod template of %s is not YAML (%s); look at the values that hold lists or maps of Kubernetes" .component (get $parsed "Error")) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $parsed (default dict $workload.podTemplate.merge)) }}
{{- end }}

{{- define "bindery.podTemplate.text" -}}
{{- $w := .workload -}}
{{- $root := .root -}}
{{- $context := dict "root" .root "component" .component -}}
metadata:
  labels:
    {{- /* Without the versions: they would restart pods whose image did not change. */}}
    {{- $labels := include "bindery.labels" $context | fromYaml }}
    {{- toYaml (mergeOverwrite (deepCopy (default dict $w.podLabels)) (omit $labels "helm.sh/chart" "app.kubernetes.io/version")) | nindent 4 }}
  {{- $annotations := deepCopy (default dict $w.podAnnotations) }}
  {{- with .checksum }}
  {{- $_ := set $annotations "checksum/config" (sha256sum .) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "bindery.serviceAccountName" $context | quote }}
  automountServiceAccountToken: {{ or .token $w.automountServiceAccountToken | default false }}
  # The variables that Kubernetes would make of the services' names look like our settings (BINDERY_BROKER_PORT).
  enableServiceLinks: false
  {{- with $w.shareProcessNamespace }}
  shareProcessNamespace: {{ . }}
  {{- end }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $w.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ int $w.terminationGracePeriodSeconds }}
  {{- with $w.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $w.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $w.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "bindery.affinity" (dict "workload" $w "context" $context) }}
  affinity:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with include "bindery.spread" (dict "workload" $w "context" $context) }}
  topologySpreadConstraints:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with $w.dnsPolicy }}
  dnsPolicy: {{ . }}
  {{- end }}
  {{- with $w.dnsConfig }}
  dnsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $w.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "bindery.image" (dict "root" $root "image" $w.image) }}
      imagePullPolicy: {{ $w.image.pullPolicy }}
      # A process that dies without a last word of its own leaves the end of its log in the pod's status.
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- toYaml $w.containerSecurityContext | nindent 8 }}
      {{- $container := fromYaml .container }}
      {{- if hasKey $container "Error" }}
      {{- fail (printf "the container of %s is not YAML (%s); look at its config and env values" .component (get $container "Error")) }}
      {{- end }}
      {{- with omit $container "env" "volumeMounts" }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      env:
        {{- include "bindery.mergedEnv" (dict "ours" (default list $container.env) "theirs" (default list $w.env)) | nindent 8 }}
      {{- with $w.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "bindery.probes" (dict "workload" $w "probes" (default dict .probes)) }}
      {{- . | nindent 6 }}
      {{- end }}
      resources:
        {{- toYaml $w.resources | nindent 8 }}
      volumeMounts:
        {{- toYaml (concat (default list $container.volumeMounts) (list (dict "name" "tmp" "mountPath" "/tmp")) (default list $w.extraVolumeMounts)) | nindent 8 }}
    {{- with $w.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $w.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Environment variables: the operator's replace ours of the same name, in ours' place, where later ones refer to them. */}}
{{- define "bindery.mergedEnv" -}}
{{- $theirs := dict -}}
{{- range .theirs -}}{{- $_ := set $theirs .name . -}}{{- end -}}
{{- $result := list -}}
{{- $names := dict -}}
{{- range .ours -}}
{{- $result = append $result (get $theirs .name | default .) -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- range .theirs -}}
{{- if not (hasKey $names .name) -}}{{- $result = append $result . -}}{{- end -}}
{{- end -}}
{{- toYaml $result }}
{{- end }}

{{/* Which nodes two pods of a workload may share. Soft by default: on one node all still start. Hard for production:
two copies of an entry on one node die together. */}}
{{- define "bindery.affinity" -}}
{{- $w := .workload -}}
{{- if $w.affinity -}}
{{- toYaml $w.affinity }}
{{- else if eq $w.antiAffinity "hard" -}}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "bindery.selectorLabels" .context | nindent 10 }}
{{- else if eq $w.antiAffinity "soft" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "bindery.selectorLabels" .context | nindent 12 }}
{{- end }}
{{- end }}

{{/* How the pods of a workload are spread over zones. */}}
{{- define "bindery.spread" -}}
{{- $w := .workload -}}
{{- if $w.topologySpreadConstraints -}}
{{- toYaml $w.topologySpreadConstraints }}
{{- else if ne $w.zoneSpread "none" -}}
- topologyKey: topology.kubernetes.io/zone
  maxSkew: 1
  whenUnsatisfiable: {{ eq $w.zoneSpread "hard" | ternary "DoNotSchedule" "ScheduleAnyway" }}
  labelSelector:
    matchLabels:
      {{- include "bindery.selectorLabels" .context | nindent 6 }}
{{- end }}
{{- end }}

{{/* Startup, liveness and readiness: what the workload asks, with the operator's figures over its own; a handler among
the operator's replaces ours. Takes (dict "workload" $w "probes" (dict "startup" (dict ...) ...)). */}}
{{- define "bindery.probes" -}}
{{- $handlers := list "httpGet" "tcpSocket" "exec" "grpc" -}}
{{- $w := .workload -}}
{{- $result := dict -}}
{{- range $kind, $own := .probes -}}
{{- $wanted := default dict (get $w (printf "%sProbe" $kind)) -}}
{{- if dig "enabled" true $wanted -}}
{{- $probe := deepCopy $own -}}
{{- range $handlers -}}
{{- if hasKey $wanted . -}}{{- $probe = omit $probe "httpGet" "tcpSocket" "exec" "grpc" -}}{{- end -}}
{{- end -}}
{{- $_ := set $result (printf "%sProbe" $kind) (mergeOverwrite $probe (omit $wanted "enabled")) -}}
{{- end -}}
{{- end -}}
{{- if $result -}}{{- toYaml $result }}{{- end -}}
{{- end }}

{{/* Settings of a service as environment variables: `journal.groupWaitMsMax` becomes <prefix>JOURNAL_GROUP_WAIT_MS_MAX.
Quantities with Ki, Mi, Gi or Ti become bytes. Takes (dict "prefix" "BOOKIE_" "config" .Values.bookie.config). */}}
{{- define "bindery.configEnv" -}}
{{- $prefix := .prefix -}}
{{- range $key, $value := .config }}
{{- $name := printf "%s%s" $prefix (regexReplaceAll "([A-Z])" $key "_${1}" | upper) }}
{{- if kindIs "map" $value }}
{{- include "bindery.configEnv" (dict "prefix" (printf "%s_" $name) "config" $value) }}
{{- else if not (kindIs "invalid" $value) }}
{{- $text := toString $value }}
{{- if kindIs "float64" $value }}
{{- if eq (floor $value) $value }}{{ $text = int64 $value | toString }}{{ end }}
{{- else if and (kindIs "string" $value) (regexMatch "^[0-9]+(\\.[0-9]+)?[KMGT]i$" $value) }}
{{- $text = include "bindery.bytes" $value }}
{{- end }}
- name: {{ $name }}
  value: {{ $text | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The environment that all our services start with. Takes (dict "root" $ "prefix" "BOOKIE_"). */}}
{{- define "bindery.serviceEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
# Why a container ended is shown by `kubectl describe pod`.
- name: BINDERY_TERMINATION_LOG
  value: /dev/termination-log
- name: {{ .prefix }}ZOOKEEPER
  value: {{ include "bindery.zookeeperServers" .root | quote }}
- name: {{ .prefix }}HOST
  value: "0.0.0.0"
# Without it, a service refuses to listen on other addresses than loopback, because it does not authenticate clients.
- name: {{ .prefix }}INSECURE
  value: "true"
{{- end }}

{{/* Probes of a service without a replay: three minutes to start, and a minute and a half more than it waits for ZooKeeper,
or it would be killed before it says what it waits for. Takes (dict "root" $ "component" "broker"). */}}
{{- define "bindery.httpProbes" -}}
{{- $waitS := (get .root.Values .component).config.zookeeperConnectTimeoutS | float64 | ceil | int -}}
startup:
  httpGet: {path: /startupz, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ max 90 (div (add $waitS 91) 2) }}
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
