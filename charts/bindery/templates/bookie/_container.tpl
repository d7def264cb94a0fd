{{/* The claims of a bookie by name: one common claim, or one for the journal and one for ledgers. Use with fromYaml. */}}
{{- define "bindery.bookie.claims" -}}
{{- $persistence := .Values.bookie.persistence -}}
{{- if $persistence.common.enabled -}}
{{- toYaml (dict "data" $persistence.common) }}
{{- else -}}
{{- toYaml (dict "journal" $persistence.journal "ledgers" $persistence.ledgers) }}
{{- end }}
{{- end }}

{{- define "bindery.bookie.container" -}}
{{- $service := printf "%s-bookie" (include "bindery.fullname" .) -}}
ports:
  - {name: ledger, containerPort: 3181}
  - {name: http, containerPort: 8000}
env:
  {{- include "bindery.serviceEnv" (dict "root" . "prefix" "BOOKIE_") | nindent 2 }}
  # The permanent identity of this bookie: the name of its pod, without address, namespace or cluster domain, so that its
  # disks can be moved to another namespace or cluster.
  - name: BOOKIE_BOOKIE_ID
    value: $(POD_NAME).{{ $service }}
  - name: BOOKIE_ADVERTISED_HOST
    value: $(POD_NAME).{{ $service }}.$(POD_NAMESPACE).svc.{{ .Values.clusterDomain }}
  - name: BOOKIE_JOURNAL_DIR
    value: /data/journal
  - name: BOOKIE_LEDGER_DIR
    value: /data/ledgers
  {{- if .Values.bookie.rack.fromNode }}
  - name: BOOKIE_RACK_FILE
    value: /run/bindery/rack/rack
  {{- end }}
  {{- include "bindery.adminToken.env" (dict "root" . "variable" "BOOKIE_ADMIN_TOKEN_FILE") | indent 2 }}
  {{- include "bindery.configEnv" (dict "prefix" "BOOKIE_" "config" (include "bindery.config" (dict "root" . "component" "bookie") | fromYaml)) | nindent 2 }}
lifecycle:
  preStop:
    # Puts the bookie into maintenance, so that the auditors do not copy its entries because of a restart.
    exec:
      command: [bindery-bookie-prestop]
volumeMounts:
  {{- if .Values.bookie.persistence.common.enabled }}
  - {name: data, mountPath: /data}
  {{- else }}
  - {name: journal, mountPath: /data/journal}
  - {name: ledgers, mountPath: /data/ledgers}
  {{- end }}
  {{- if .Values.bookie.rack.fromNode }}
  - {name: rack, mountPath: /run/bindery/rack, readOnly: true}
  {{- end }}
  {{- include "bindery.adminToken.mount" . | indent 2 }}
{{- end }}

{{/* Writes the rack of the bookie, a label of its node, to a file. Pods cannot see the labels of their node. Only this container
has a token for the Kubernetes API, and its account may only read nodes. */}}
{{- define "bindery.bookie.init" -}}
{{- $w := include "bindery.workload" (dict "root" . "component" "bookie") | fromYaml -}}
{{- if .Values.bookie.rack.fromNode }}
- name: rack
  image: {{ include "bindery.image" (dict "root" . "image" $w.image) }}
  imagePullPolicy: {{ $w.image.pullPolicy }}
  command: [bindery-bookie-rack, /run/bindery/rack/rack, {{ .Values.bookie.rack.nodeLabel | quote }}]
  env:
    - name: NODE_NAME
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
    - name: BINDERY_ACCOUNT_DIRECTORY
      value: /run/bindery/account
  securityContext:
    {{- toYaml $w.containerSecurityContext | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 128Mi}
  volumeMounts:
    - {name: rack, mountPath: /run/bindery/rack}
    - {name: node-reader, mountPath: /run/bindery/account, readOnly: true}
{{- end }}
{{- end }}

{{- define "bindery.bookie.volumes" -}}
{{- include "bindery.adminToken.volume" . }}
{{- if .Values.bookie.rack.fromNode }}
- name: rack
  emptyDir: {}
- name: node-reader
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap:
          name: kube-root-ca.crt
          items:
            - {key: ca.crt, path: ca.crt}
{{- end }}
{{- if not .Values.bookie.persistence.enabled }}
{{- range $name, $claim := include "bindery.bookie.claims" . | fromYaml }}
{{ include "bindery.emptyDir" (dict "name" $name "claim" $claim) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "bindery.bookie.probes" -}}
{{- $context := dict "root" . "component" "bookie" -}}
# A start takes up to half an hour: it replays the journal first and reports its progress.
startup:
  httpGet: {{ include "bindery.httpGet" (merge (dict "path" "/startupz") $context) }}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 600
# The liveness probe depends only on the process, not on ZooKeeper.
liveness:
  httpGet: {{ include "bindery.httpGet" (merge (dict "path" "/livez") $context) }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readiness:
  httpGet: {{ include "bindery.httpGet" (merge (dict "path" "/readyz") $context) }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}
