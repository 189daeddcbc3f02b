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

# Ends at SIGTERM and SIGINT where no command is attended; process 1 would not hear them otherwise.
end_at_signals() {
  trap 'exit 143' TERM
  trap 'exit 130' INT
}

# Runs a command and ends it at SIGTERM and SIGINT; a command that was ended so ends this script too.
attended() {
  local child="" status=0 signal=""
  trap 'signal=TERM; end_child' TERM
  trap 'signal=INT; end_child' INT
  "$@" &
  child=$!
  # The signal may have come before the child was known.
  if [[ -n $signal ]]; then end_child; fi
  wait "$child" || status=$?
  if [[ -n $signal ]]; then
    # Each signal cuts a wait short.
    while kill -0 "$child" 2>/dev/null; do wait "$child" 2>/dev/null || true; done
    say "stopped by SIG$signal"
    if [[ $signal == TERM ]]; then exit 143; else exit 130; fi
  fi
  end_at_signals
  return "$status"
}

# Sends SIGTERM whichever signal came: what a script runs in the background ignores SIGINT.
end_child() {
  if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi
}
