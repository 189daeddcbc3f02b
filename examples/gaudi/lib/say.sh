# Words to the user: what is done goes to standard error, and a refusal is one sentence.
# shellcheck shell=bash

say() {
  printf 'launch: %s\n' "$*" >&2
}

# Ends with one sentence that says what to do, and exit code 2.
stop() {
  say "$*"
  exit 2
}

# A command as it could be typed.
quoted() {
  printf '%q ' "$@"
}
