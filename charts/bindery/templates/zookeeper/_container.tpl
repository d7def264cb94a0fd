{{- define "bindery.zookeeper.container" -}}
{{- $heap := div (include "bindery.bytes" .Values.zookeeper.heapSize | int64) 1048576 -}}
ports:
  - {name: client, containerPort: 2181}
  - {name: peer, containerPort: 2888}
  - {name: election, containerPort: 3888}
  {{- if .Values.zookeeper.metrics.enabled }}
  - {name: metrics, containerPort: 7000}
  {{- end }}
env:
  - name: ZOO_MY_ID
    valueFrom:
      fieldRef:
        fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
  # The image's start script sets a heap of 1000 MiB; the later flag overrides it.
  - name: ZK_SERVER_HEAP
    value: {{ $heap | quote }}
  # Java caches the address of a name for 30 s by default. Other servers would use the old address of a restarted pod that long.
  - name: JVMFLAGS
    value: -Xmx{{ $heap }}m -Dsun.net.inetaddr.ttl=2 -Dsun.net.inetaddr.negative.ttl=1 -Dlogback.configurationFile=/conf/logback.xml
volumeMounts:
  - {name: data, mountPath: /data}
  - {name: logs, mountPath: /logs}
  - {name: files, mountPath: /conf/zoo.cfg, subPath: zoo.cfg, readOnly: true}
  - {name: files, mountPath: /conf/logback.xml, subPath: logback.xml, readOnly: true}
  - {name: files, mountPath: /probe/serving, subPath: serving, readOnly: true}
{{- end }}

{{- define "bindery.zookeeper.volumes" -}}
- name: files
  configMap:
    name: {{ include "bindery.fullname" . }}-zookeeper
    defaultMode: 0555
- name: logs
  emptyDir: {}
{{- if not .Values.zookeeper.persistence.enabled }}
{{ include "bindery.emptyDir" (dict "name" "data" "claim" .Values.zookeeper.persistence) }}
{{- end }}
{{- end }}

{{- define "bindery.zookeeper.probes" -}}
startup:
  tcpSocket: {port: client}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 150
# A server is alive if it listens on its port. A server without a majority must not be restarted, because a restart does not
# help it to find one.
liveness:
  tcpSocket: {port: client}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
# A rolling update continues with the next server after this one has joined the majority.
readiness:
  exec:
    command: [/probe/serving]
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}
