# curl and nothing else: an answer, a stream, and what an unknown model is told, a line each.
set -eu
ask() { curl -sSN "$1/v1/chat/completions" -H "Authorization: Bearer $2" -H 'Content-Type: application/json' -d "$3"; echo; }
ask "$1" "$2" '{"model": "'"$3"'", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'
ask "$1" "$2" '{"model": "'"$3"'", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": true}' | grep -v '^$'
ask "$1" "$2" '{"model": "nobody", "messages": []}'
