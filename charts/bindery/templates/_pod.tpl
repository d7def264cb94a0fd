{{/*
The pod template that all workloads share. The file of a workload has its specific parts: its container's ports, command,
environment, hooks, probes and mounts, and its volumes. This template adds everything that an operator can configure for
every workload.
*/}}

{{/* Takes a dict:
  root       the root context
  token      whether the pod gets a token for the Kubernetes API regardless of the values; may be omitted
  component  the key of the workload in the values; also the name of its container
  container  text: the workload's fields of the container, as YAML
  volumes    text: a list of volumes, as YAML; may be empty
  checksum   text whose change restarts the pods: the content of a ConfigMap; may be empty
  probes     dict of startup, liveness, readiness: each a dict with the handler and the defaults of this workload
  pod        text: the workload's fields of the pod's spec, as YAML; may be empty
  init       text: the workload's init containers, a list as YAML; may be empty
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
    {{- /* The labels with versions are omitted, because they would restart pods whose image did not change. */}}
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
  # The variables that Kubernetes derives from the names of services look like settings of Bindery (BINDERY_BROKER_PORT).
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
  {{- with concat (.init | default "[]" | fromYamlArray) (default list $w.initContainers) }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "bindery.image" (dict "root" $root "image" $w.image) }}
      imagePullPolicy: {{ $w.image.pullPolicy }}
      # If a process ends without a termination message, the pod's status shows the end of its log.
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
        {{- $secure := include "bindery.security.mount" $context | fromYamlArray }}
        {{- toYaml (concat (default list $container.volumeMounts) (list (dict "name" "tmp" "mountPath" "/tmp")) $secure (default list $w.extraVolumeMounts)) | nindent 8 }}
    {{- with $w.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with include "bindery.security.volume" $context }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $w.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Environment variables. A variable of the operator replaces the chart's variable of the same name at the same position,
because later variables may refer to it. */}}
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

{{/* Anti-affinity of the pods of a workload. It is soft by default, so that all pods start on a single node. Use hard in
production, because a lost node could otherwise take two replicas of an entry with it. */}}
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

{{/* Distribution of the pods of a workload over zones. */}}
{{- define "bindery.spread" -}}
{{- $w := .workload -}}
{{- if $w.topologySpreadConstraints -}}
{{- toYaml $w.topologySpreadConstraints }}
{{- else if ne $w.zoneSpread "none" -}}
- topologyKey: topology.kubernetes.io/zone
  maxSkew: 1
  whenUnsatisfiable: {{ eq $w.zoneSpread "hard" | ternary "DoNotSchedule" "ScheduleAnyway" }}
  {{- if has .context.component (list "broker" "auditor") }}
  # Pods of the previous revision do not count: they are about to stop, and would leave the new ones unevenly distributed.
  matchLabelKeys: [pod-template-hash]
  {{- end }}
  labelSelector:
    matchLabels:
      {{- include "bindery.selectorLabels" .context | nindent 6 }}
{{- end }}
{{- end }}

{{/* Startup, liveness and readiness probes: those of the workload, overridden by the fields that the operator sets. A
handler that the operator sets replaces the workload's. Takes (dict "workload" $w "probes" (dict "startup" (dict ...) ...)). */}}
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
{{- if hasSuffix "_HTTP_HOSTS" $name }}{{/* in bindery.serviceEnv, together with the names in the cluster */}}
{{- else if kindIs "map" $value }}
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

{{/* The host names under which clients reach a service, separated by commas: its names in the cluster, hosts of its Ingress
     and HTTPRoute, and those of its configuration. Takes (dict "root" $ "component" "broker"). */}}
{{- define "bindery.httpHosts" -}}
{{- $name := printf "%s-%s" (include "bindery.fullname" .root) .component -}}
{{- $qualified := printf "%s.%s" $name .root.Release.Namespace -}}
{{- $hosts := list $name $qualified (print "*." $name) (print "*." $qualified) "*.svc" (print "*.svc." .root.Values.clusterDomain) -}}
{{- $values := index .root.Values .component -}}
{{- $ingress := default dict $values.ingress -}}
{{- if $ingress.enabled }}{{ $hosts = concat $hosts $ingress.hosts }}{{ end -}}
{{- $route := default dict $values.httpRoute -}}
{{- if $route.enabled }}{{ $hosts = concat $hosts $route.hosts }}{{ end -}}
{{- with (default dict $values.config.http).hosts }}{{ $hosts = append $hosts . }}{{ end -}}
{{- join "," $hosts }}
{{- end }}

{{/* The environment of all of Bindery's services. Takes (dict "root" $ "prefix" "BOOKIE_"). */}}
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
# The service writes the cause of a failure to this file; `kubectl describe pod` shows it.
- name: BINDERY_TERMINATION_LOG
  value: /dev/termination-log
- name: {{ .prefix }}ZOOKEEPER
  value: {{ include "bindery.zookeeperServers" .root | quote }}
- name: {{ .prefix }}HOST
  value: "0.0.0.0"
# Requests that name other hosts are refused: they may come from a web page that poses as this service.
- name: {{ .prefix }}HTTP_HOSTS
  value: {{ include "bindery.httpHosts" (dict "root" .root "component" (.prefix | trimSuffix "_" | lower)) | quote }}
{{- if not (include "bindery.authenticates" .) }}
# Without it, a service that does not authenticate clients refuses to listen on other addresses than loopback. It is omitted
# with authentication, so that a service whose authentication is removed does not start.
- name: {{ .prefix }}INSECURE
  value: "true"
{{- end }}
{{- end }}

{{/* Not empty if the values configure authentication for every port of a service. Takes (dict "root" $ "prefix" "BOOKIE_"). */}}
{{- define "bindery.authenticates" -}}
{{- $component := .prefix | trimSuffix "_" | lower -}}
{{- $config := include "bindery.config" (dict "root" .root "component" $component) | fromYaml -}}
{{- if eq .prefix "BOOKIE_" -}}
{{- if has (dig "auth" "provider" "" $config) (list "token" "certificate") -}}true{{- end -}}
{{- else if eq .prefix "BROKER_" -}}
{{- $auth := default dict $config.auth -}}
{{- if and (or $auth.tokensKeysFile $auth.passwordsFile (ne (default "none" $auth.certificateRole) "none")) (not $auth.anonymousRole) -}}true{{- end -}}
{{- else if eq .prefix "AUDITOR_" -}}
{{- include "bindery.hasAdminTokens" (dict "root" .root "service" "auditor") -}}
{{- end -}}
{{- end }}

{{/* The file of operators' tokens in a pod. */}}
{{- define "bindery.adminToken.env" -}}
{{- if .root.Values.adminToken.secretName }}
- name: {{ .variable }}
  value: /etc/bindery/admin/token
{{- end }}
{{- end }}

{{- define "bindery.adminToken.mount" -}}
{{- if .Values.adminToken.secretName }}
- {name: admin-token, mountPath: /etc/bindery/admin, readOnly: true}
{{- end }}
{{- end }}

{{- define "bindery.adminToken.volume" -}}
{{- with .Values.adminToken }}
{{- if .secretName }}
- name: admin-token
  secret:
    secretName: {{ .secretName | quote }}
    items:
      - {key: {{ .key | quote }}, path: token}
{{- end }}
{{- end }}
{{- end }}

{{/* Probes of a service without a replay. It has three minutes to start, and at least a minute and a half more than its
timeout for ZooKeeper: otherwise it would be killed before it reports what it waits for.
Takes (dict "root" $ "component" "broker"). */}}
{{- define "bindery.httpProbes" -}}
{{- $waitS := (get .root.Values .component).config.zookeeperConnectTimeoutS | float64 | ceil | int -}}
startup:
  httpGet: {{ include "bindery.httpGet" (merge (dict "path" "/startupz") .) }}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ max 90 (div (add $waitS 91) 2) }}
liveness:
  httpGet: {{ include "bindery.httpGet" (merge (dict "path" "/livez") .) }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readiness:
  httpGet: {{ include "bindery.httpGet" (merge (dict "path" "/readyz") .) }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}

{{/* Handler of a probe on the HTTP port. Kubernetes does not verify the certificate of a probe.
Takes (dict "root" $ "component" "broker" "path" "/livez"). */}}
{{- define "bindery.httpGet" -}}
{{- $get := dict "path" .path "port" "http" -}}
{{- if eq (include "bindery.scheme" .) "https" -}}{{- $_ := set $get "scheme" "HTTPS" -}}{{- end -}}
{{- toJson $get }}
{{- end }}
