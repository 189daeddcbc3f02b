# Step serve: the server in the place of this process, on the cores beside its card.
# shellcheck shell=bash

step_serve() {
  need_limits
  local arguments=() extra=()
  if [[ -n $IS_DRY && ! -s $(manifest_file) ]]; then
    say "there is no manifest yet"
  else
    need_manifest
  fi
  check_state
  mapfile -t arguments < <(engine_options)
  arguments+=(--buckets "$(manifest_file)" --host "$HOST" --port "$PORT" --drain-seconds "$DRAIN_SECONDS")
  arguments+=(--metrics-namespace "$METRICS_NAMESPACE")
  [[ -z $SERVED_MODEL_NAME ]] || arguments+=(--served-model-name "$SERVED_MODEL_NAME")
  [[ -z $API_KEY_FILE ]] || arguments+=(--api-key-file "$API_KEY_FILE")
  [[ -z $MAX_QUEUE ]] || arguments+=(--max-queue "$MAX_QUEUE")
  [[ -z $LOG_REQUESTS ]] || arguments+=(--log-requests "$LOG_REQUESTS")
  if ((REPLICAS > 1)); then
    arguments+=(--replicas "$REPLICAS")
    [[ -z $ROUTER ]] || arguments+=(--router "$ROUTER")
    [[ $RECORD_SHAPES == 0 ]] || say "note: replicas record no shapes; plan with the recording of one server"
  elif [[ $RECORD_SHAPES == 1 ]]; then
    arguments+=(--record-shapes "$(shapes_file)")
  fi
  [[ -z $PROFILE_STEPS ]] || arguments+=(--profile-steps "$PROFILE_STEPS" --profile-dir "$PROFILE_DIR")
  read -r -a extra <<<"$SERVE_ARGS"
  local command=(hpu-duo serve "${arguments[@]}" "${extra[@]}")
  bind_cores
  if [[ -n $IS_DRY ]]; then
    say "would run: $(quoted "${BOUND[@]}" "${command[@]}")"
    return
  fi
  if [[ $RECORD_SHAPES == 1 ]] && ((REPLICAS == 1)); then begin_recording; fi
  say "$(quoted "${BOUND[@]}" "${command[@]}")"
  # The server takes this process's place, so a SIGTERM is its own.
  exec "${BOUND[@]}" "${command[@]}"
}

# Puts taskset before the command where the cores beside the card are known and may be used.
bind_cores() {
  local cores
  BOUND=()
  [[ $DEVICE == hpu && $BIND_CORES == 1 ]] || return 0
  # Several processes bind themselves, each to cores of its own.
  ((NUM_CARDS == 1)) || return 0
  if [[ -z ${CARD:-} ]]; then
    read_cards
    choose_card
  fi
  cores=$(card_cores "$CARD")
  if [[ -n $cores ]] && command -v taskset >/dev/null && taskset -c "$cores" true 2>/dev/null; then
    BOUND=(taskset -c "$cores")
  else
    say "note: cores are not bound; the card's are ${cores:-unknown}, and may not be used here"
  fi
}

# Notes the limits beside the recording, for the plan that is made of it.
begin_recording() {
  local inputs
  keep_recording
  # A recording from elsewhere keeps no note: under which limits it was made is not known.
  [[ ! -s $(shapes_file) ]] || return 0
  mapfile -t inputs < <(recording_inputs)
  note_inputs "$(shapes_file)" "${inputs[@]}"
}
