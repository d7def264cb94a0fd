{{/* Figures that alerts compare with. */}}

{{- define "bindery.rules.bookies" -}}
{{- int .Values.bookie.replicas }}
{{- end }}

{{/* With an autoscaler: what it keeps at least. */}}
{{- define "bindery.rules.brokers" -}}
{{- .Values.broker.autoscaling.enabled | ternary .Values.broker.autoscaling.minReplicas .Values.broker.replicas | int }}
{{- end }}

{{/* Levels of audits that are as deep as the scheduled ones, for a matcher. */}}
{{- define "bindery.rules.auditLevels" -}}
{{- get (dict "quick" "quick|standard|deep" "standard" "standard|deep" "deep" "deep") .Values.audit.level }}
{{- end }}

{{- define "bindery.rules.ensemble" -}}
{{- int .Values.broker.config.ledger.ensembleSize }}
{{- end }}
