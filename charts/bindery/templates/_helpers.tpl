{{/*
Names, labels, images, quantities. Every helper takes the root context, or a dict whose members it names.
*/}}

{{- define "bindery.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Prefix of every object's name. A maximum of 40 characters leaves room for "-bookie-123" and for a hash within the 63
characters of a label. It is part of each bookie's identity: a release with another name is another cluster. */}}
{{- define "bindery.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride }}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name }}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name }}
{{- end }}
{{- end }}
{{- end }}

{{- define "bindery.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The three labels that never change. Selectors use only these. Takes (dict "root" $ "component" "bookie"). */}}
{{- define "bindery.selectorLabels" -}}
app.kubernetes.io/name: {{ include "bindery.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* All labels of an object. Takes (dict "root" $ "component" "bookie"). */}}
{{- define "bindery.labels" -}}
{{- $own := include "bindery.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "helm.sh/chart" (include "bindery.chart" .root) -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "bindery" -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- toYaml (mergeOverwrite (deepCopy (default dict .root.Values.commonLabels)) $own) }}
{{- end }}

{{/* metadata of an object: name, namespace, labels, annotations.
Takes (dict "root" $ "component" "bookie" "name" "x-bookie") and optionally "labels" and "annotations". */}}
{{- define "bindery.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- $labels := include "bindery.labels" . | fromYaml }}
  {{- toYaml (mergeOverwrite (deepCopy (default dict .labels)) $labels) | nindent 2 }}
{{- with mergeOverwrite (deepCopy (default dict .root.Values.commonAnnotations)) (default dict .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The values of one workload, merged over `defaults`: maps are merged, lists are replaced.
Takes (dict "root" $ "component" "bookie"); use with fromYaml. */}}
{{- define "bindery.workload" -}}
{{- $block := get (dict "gate" "upgradeGate" "test" "helmTest" "audit-executor" "audit" "secrets" "secretsJob") .component | default .component -}}
{{- $workload := mergeOverwrite (deepCopy .root.Values.defaults) (deepCopy (get .root.Values $block)) -}}
{{- if eq .component "audit-executor" -}}
{{- $_ := set $workload "serviceAccount" (mergeOverwrite (deepCopy .root.Values.defaults.serviceAccount) (deepCopy .root.Values.audit.executors.serviceAccount)) -}}
{{- end -}}
{{- if has $block (list "backup" "init" "upgradeGate" "helmTest" "secretsJob") -}}
{{- $_ := set $workload "image" (include "bindery.toolboxImage" (dict "root" .root "own" (get .root.Values $block).image) | fromYaml) -}}
{{- end -}}
{{- toYaml $workload }}
{{- end }}

{{/* The image of a job: the toolbox's image, with each field that the job sets itself replaced. A tag of the job also
removes the toolbox's digest. Another repository also removes the toolbox's tag and digest, which belong to another image.
Takes (dict "root" $ "own" .Values.init.image); use with fromYaml. */}}
{{- define "bindery.toolboxImage" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.defaults.image) (deepCopy .root.Values.toolbox.image) -}}
{{- $own := default dict .own -}}
{{- $isOther := and $own.repository (ne $own.repository $image.repository) -}}
{{- if $isOther -}}{{- $_ := set $image "tag" "" -}}{{- end -}}
{{- if and (or $isOther $own.tag) (not $own.digest) -}}{{- $_ := set $image "digest" "" -}}{{- end -}}
{{- range $key, $value := $own -}}
{{- if $value -}}{{- $_ := set $image $key $value -}}{{- end -}}
{{- end -}}
{{- toYaml $image }}
{{- end }}

{{/* The name of an image. Takes (dict "root" $ "image" .Values.bookie.image). A digest is used instead of the tag. */}}
{{- define "bindery.image" -}}
{{- $repository := .image.repository -}}
{{- with default dict .root.Values.global -}}
{{- with .imageRegistry -}}{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}{{- end -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest }}
{{- else -}}
{{- printf "%s:%s" $repository (coalesce .image.tag (default dict .root.Values.global).imageTag .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* Takes (dict "root" $ "component" "bookie"). */}}
{{- define "bindery.serviceAccountName" -}}
{{- $account := (include "bindery.workload" . | fromYaml).serviceAccount -}}
{{- if $account.create -}}
{{- default (printf "%s-%s" (include "bindery.fullname" .root) .component) $account.name }}
{{- else -}}
{{- default "default" $account.name }}
{{- end }}
{{- end }}

{{/* Addresses of the ZooKeeper servers: host:port, comma-separated, then the chroot. */}}
{{- define "bindery.zookeeperServers" -}}
{{- if .Values.zookeeper.enabled -}}
{{- printf "%s-zookeeper:2181" (include "bindery.fullname" .) }}
{{- else -}}
{{- join "," .Values.zookeeper.external.servers }}
{{- end }}
{{- default "" .Values.zookeeper.chroot }}
{{- end }}

{{/* URL of the broker inside the Kubernetes cluster. */}}
{{- define "bindery.brokerUrl" -}}
{{- printf "%s://%s-broker:%d" (include "bindery.scheme" (dict "root" . "component" "broker")) (include "bindery.fullname" .) (int .Values.broker.service.port) }}
{{- end }}

{{/* Workloads that have a service account, except the gate, whose account exists only together with its job. */}}
{{- define "bindery.accountComponents" -}}
{{- $components := list "bookie" "broker" "auditor" }}
{{- if .Values.zookeeper.enabled }}{{ $components = append $components "zookeeper" }}{{ end }}
{{- if .Values.toolbox.enabled }}{{ $components = append $components "toolbox" }}{{ end }}
{{- if .Values.audit.enabled }}{{ $components = append $components "audit" }}{{ end }}
{{- if and .Values.audit.enabled .Values.audit.executors.enabled }}{{ $components = append $components "audit-executor" }}{{ end }}
{{- if .Values.backup.enabled }}{{ $components = append $components "backup" }}{{ end }}
{{- if .Values.init.enabled }}{{ $components = append $components "init" }}{{ end }}
{{- if .Values.helmTest.enabled }}{{ $components = append $components "test" }}{{ end }}
{{- if include "bindery.secretsJob.isUsed" . }}{{ $components = append $components "secrets" }}{{ end }}
{{- toYaml $components }}
{{- end }}

{{/* Number of CPUs of a quantity such as 250m, 2 or 1.5. */}}
{{- define "bindery.cpus" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}{{- divf (trimSuffix "m" $text | float64) 1000.0 -}}{{- else -}}{{- float64 $text -}}{{- end -}}
{{- end }}

{{/* Number of bytes of a quantity such as 512Mi, 1.5Gi, 2G or 1048576, as an integer in decimal digits. */}}
{{- define "bindery.bytes" -}}
{{- $text := . | toString -}}
{{- if kindIs "float64" . -}}{{- $text = int64 . | toString -}}{{- end -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if or (eq $number "") (not (hasKey $factors $unit)) -}}
{{- fail (printf "%q is not a quantity: write bytes, or a number with Ki, Mi, Gi, Ti, k, M, G or T, such as 512Mi" $text) -}}
{{- end -}}
{{- if contains "." $number -}}
{{- int64 (floor (mulf (float64 $number) (float64 (get $factors $unit)))) }}
{{- else -}}
{{- mul (int64 $number) (int64 (get $factors $unit)) }}
{{- end }}
{{- end }}
