{{/* The files of a ZooKeeper server. They are the same for all servers; ZOO_MY_ID has the id of the server. The image's entry
point writes zoo.cfg from variables only if the file does not exist. */}}
{{- define "bindery.zookeeper.files" -}}
{{- $fullname := include "bindery.fullname" . -}}
{{- $lines := dict
  "dataDir" "/data"
  "tickTime" "2000"
  "initLimit" "10"
  "syncLimit" "5"
  "autopurge.snapRetainCount" "3"
  "autopurge.purgeInterval" "1"
  "admin.enableServer" "false"
  "standaloneEnabled" "true"
  "4lw.commands.whitelist" "ruok,srvr,mntr"
-}}
{{- if .Values.zookeeper.metrics.enabled -}}
{{- $_ := set $lines "metricsProvider.className" "org.apache.zookeeper.metrics.prometheus.PrometheusMetricsProvider" -}}
{{- $_ := set $lines "metricsProvider.httpPort" "7000" -}}
{{- $_ := set $lines "metricsProvider.exportJvmInfo" "true" -}}
{{- end -}}
{{- range $id := untilStep 1 (int (add1 .Values.zookeeper.replicas)) 1 -}}
{{- $host := printf "%s-zookeeper-%d.%s-zookeeper-headless.%s.svc.%s" $fullname $id $fullname $.Release.Namespace $.Values.clusterDomain -}}
{{- $_ := set $lines (printf "server.%d" $id) (printf "%s:2888:3888;2181" $host) -}}
{{- end -}}
{{- if eq (int .Values.zookeeper.replicas) 1 -}}
{{- $lines = set (omit $lines "server.1") "clientPort" "2181" -}}
{{- end -}}
{{- range $key, $value := .Values.zookeeper.config -}}
{{- $_ := set $lines $key (kindIs "float64" $value | ternary (printf "%v" (int64 $value)) (toString $value)) -}}
{{- end -}}
zoo.cfg: |
  {{- range $key, $value := $lines }}
  {{ $key }}={{ $value }}
  {{- end }}
logback.xml: |
  <configuration>
    <appender name="console" class="ch.qos.logback.core.ConsoleAppender">
      <encoder><pattern>%d{ISO8601} %-5p [%t] %c{1}: %m%n</pattern></encoder>
    </appender>
    <root level="{{ .Values.zookeeper.logLevel }}"><appender-ref ref="console"/></root>
  </configuration>
serving: |
  {{- .Files.Get "files/zookeeper/serving" | nindent 2 }}
{{- end }}
