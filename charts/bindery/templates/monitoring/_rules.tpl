{{/* Values with which alerts compare metrics. */}}

{{- define "bindery.rules.bookies" -}}
{{- int .Values.bookie.replicas }}
{{- end }}

{{/* Expected number of brokers; with an autoscaler, its minimum. */}}
{{- define "bindery.rules.brokers" -}}
{{- .Values.broker.autoscaling.enabled | ternary .Values.broker.autoscaling.minReplicas .Values.broker.replicas | int }}
{{- end }}

{{/* Regular expression of the audit levels that are at least as deep as the scheduled one, for a PromQL matcher. */}}
{{- define "bindery.rules.auditLevels" -}}
{{- get (dict "quick" "quick|standard|deep" "standard" "standard|deep" "deep" "deep") .Values.audit.level }}
{{- end }}

{{- define "bindery.rules.ensemble" -}}
{{- int .Values.broker.config.ledger.ensembleSize }}
{{- end }}
