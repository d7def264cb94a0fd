{{- define "bindery.backup.claim" -}}
{{- default (printf "%s-backup" (include "bindery.fullname" .)) .Values.backup.persistence.existingClaim }}
{{- end }}

{{/* The volume with the backups, and the Secret that describes the store to which they are sent. */}}
{{- define "bindery.backup.volumes" -}}
{{- if .Values.backup.persistence.enabled -}}
- name: backups
  persistentVolumeClaim:
    claimName: {{ include "bindery.backup.claim" . }}
{{- else -}}
{{- include "bindery.emptyDir" (dict "name" "backups" "claim" .Values.backup.persistence) }}
{{- end }}
{{- with .Values.backup.upload.secretName }}
- name: upload
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* A container that mounts them. Takes (dict "root" $ "words" (list "args" ...)), or "command" instead of "args". */}}
{{- define "bindery.backup.container" -}}
{{- range $key := list "command" "args" }}
{{- with get $ $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
env:
  {{- include "bindery.toolEnv" .root | nindent 2 }}
  - name: BINDERY_TERMINATION_LOG
    value: /dev/termination-log
volumeMounts:
  - {name: backups, mountPath: /backups}
  {{- if .root.Values.backup.upload.secretName }}
  - {name: upload, mountPath: /etc/bindery/upload, readOnly: true}
  {{- end }}
{{- end }}

{{/* The pod template of the backup's jobs. Takes the same. */}}
{{- define "bindery.backup.podTemplate" -}}
{{- include "bindery.podTemplate" (dict "root" .root "component" "backup"
      "container" (include "bindery.backup.container" .)
      "volumes" (include "bindery.backup.volumes" .root)
      "pod" "restartPolicy: Never") }}
{{- end }}
