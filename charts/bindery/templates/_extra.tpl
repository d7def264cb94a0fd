{{/* The objects of `extraManifests`: maps as they are, texts as templates, each with one or more YAML documents. What is no
object of Kubernetes becomes (dict "problem" text). Use with fromYamlArray. */}}
{{- define "bindery.extraManifests" -}}
{{- $found := list -}}
{{- range $index, $manifest := .Values.extraManifests -}}
{{- if kindIs "string" $manifest -}}
{{- range regexSplit "(?m)^---.*$" (tpl $manifest $) -1 -}}
{{- if regexMatch "(?m)^[^#\\s]" . -}}
{{- $found = append $found (fromYaml .) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $found = append $found $manifest -}}
{{- end -}}
{{- end -}}
{{- toYaml $found }}
{{- end }}

{{- define "bindery.problems.extra" -}}
{{- $problems := list -}}
{{- range $index, $manifest := include "bindery.extraManifests" . | fromYamlArray -}}
{{- $missing := list -}}
{{- range list "apiVersion" "kind" -}}
{{- if not (get $manifest .) -}}{{- $missing = append $missing . -}}{{- end -}}
{{- end -}}
{{- if not (dig "metadata" "name" "" (omit $manifest "Error")) -}}{{- $missing = append $missing "metadata.name" -}}{{- end -}}
{{- if hasKey $manifest "Error" -}}
{{- $problems = append $problems (printf "document %d of extraManifests is not a map in YAML (%s): write one object of Kubernetes, after the replacement of its template" (add1 $index) (get $manifest "Error" | trunc 200)) -}}
{{- else if $missing -}}
{{- $problems = append $problems (printf "document %d of extraManifests has no %s: write a complete object of Kubernetes" (add1 $index) (join ", " $missing)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}
