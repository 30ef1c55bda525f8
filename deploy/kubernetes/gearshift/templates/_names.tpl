{{- define "gearshift.labels" -}}
app.kubernetes.io/name: gearshift
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gearshift.metadata" -}}
{{- include "gearshift.metadataOf" (list . .Release.Name) -}}
{{- end }}

{{- define "gearshift.metadataOf" -}}
{{- $name := index . 1 -}}
{{- with index . 0 -}}
name: {{ $name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "gearshift.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- end }}

{{- /* A setting as its variable has it: whole numbers without an exponent, lists with commas, maps as a=1,b=2. */ -}}
{{- define "gearshift.setting" -}}
{{- if kindIs "slice" . -}}
{{- $words := list -}}{{- range . }}{{ $words = append $words (include "gearshift.setting" .) }}{{ end -}}
{{- join "," $words -}}
{{- else if kindIs "map" . -}}
{{- $words := list -}}
{{- range $name, $value := . }}{{ $words = append $words (printf "%s=%s" $name (include "gearshift.setting" $value)) }}{{ end -}}
{{- join "," $words -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{- define "gearshift.requestTopics" -}}
{{- $prefix := printf "%s%s" .Values.kafka.topicPrefix (get .Values.settings "requests" | default "requests") -}}
{{- $calls := printf "%s%s" .Values.kafka.topicPrefix (get .Values.settings "calls" | default "calls") -}}
{{- $throttled := printf "%s%s" .Values.kafka.topicPrefix (get .Values.settings "throttled" | default "throttled") -}}
{{- $topics := list $prefix $calls $throttled -}}
{{- range $alias, $_ := .Values.models.config.models }}{{ $topics = append $topics (printf "%s.%s" $prefix $alias) }}{{ end -}}
{{- $topics | toJson -}}
{{- end }}

{{- /* Whether the server speaks HTTPS: with a certificate and its key, in secretFiles or by settings. */ -}}
{{- define "gearshift.https" -}}
{{- $files := .Values.secretFiles -}}
{{- $chain := or (hasKey $files "http_ssl_certfile") (hasKey .Values.settings "http_ssl_certfile") -}}
{{- $key := or (hasKey $files "http_ssl_keyfile") (hasKey .Values.settings "http_ssl_keyfile") -}}
{{- if ne $chain $key -}}
{{- fail "http_ssl_certfile and http_ssl_keyfile need each other" -}}
{{- end -}}
{{- if $chain }}yes{{ end -}}
{{- end }}
