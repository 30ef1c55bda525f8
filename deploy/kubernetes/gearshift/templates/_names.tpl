{{- define "gearshift.labels" -}}
app.kubernetes.io/name: gearshift
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gearshift.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "gearshift.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "gearshift.requestTopics" -}}
{{- $prefix := printf "%s%s" .Values.kafka.topicPrefix (get .Values.settings "requests" | default "requests") -}}
{{- $topics := list $prefix -}}
{{- range $alias, $_ := .Values.models.config.models }}{{ $topics = append $topics (printf "%s.%s" $prefix $alias) }}{{ end -}}
{{- $topics | toJson -}}
{{- end }}
