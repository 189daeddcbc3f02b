# Commands: run in the background, so that SIGTERM reaches them at once even where this is process 1.
# shellcheck shell=bash

# Runs a command, or only shows it with --dry-run; returns its exit code.
run() {
  if [[ -n $IS_DRY ]]; then
    say "would run: $(quoted "$@")"
    return
  fi
  say "$(quoted "$@")"
  attended "$@"
}

# Runs a command and passes SIGTERM and SIGINT on; a command that was ended so ends this script too.
attended() {
  local child status=0 signal=""
  "$@" &
  child=$!
  trap 'signal=TERM; kill -TERM "$child" 2>/dev/null' TERM
  trap 'signal=INT; kill -INT "$child" 2>/dev/null' INT
  wait "$child" || status=$?
  if [[ -n $signal ]]; then
    # The first wait was cut short by the signal.
    wait "$child" 2>/dev/null || true
    say "stopped by SIG$signal"
    if [[ $signal == TERM ]]; then exit 143; else exit 130; fi
  fi
  trap - TERM INT
  return "$status"
}
