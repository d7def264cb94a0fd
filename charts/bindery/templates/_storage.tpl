{{/* One volume claim template. It has only labels that never change, because Kubernetes refuses every change of it.
Takes (dict "root" $ "component" "bookie" "name" "journal" "claim" .Values.bookie.persistence.journal). */}}
{{- define "bindery.claimTemplate" -}}
- metadata:
    name: {{ .name }}
    labels:
      {{- toYaml (mergeOverwrite (deepCopy (default dict .claim.labels)) (include "bindery.selectorLabels" . | fromYaml)) | nindent 6 }}
    {{- with .claim.annotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    accessModes:
      {{- toYaml .claim.accessModes | nindent 6 }}
    {{- with .claim.storageClass }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources:
      requests:
        storage: {{ .claim.size }}
{{- end }}

{{/* The volume that replaces a claim if persistence is disabled. Takes (dict "name" "journal" "claim" ...). */}}
{{- define "bindery.emptyDir" -}}
- name: {{ .name }}
  emptyDir:
    {{- with .claim.medium }}
    medium: {{ . }}
    {{- end }}
    sizeLimit: {{ .claim.size }}
{{- end }}
