# Steps plan, warmup and verify: which shapes to capture, capturing them ahead, and whether that still holds.
# shellcheck shell=bash

step_plan() {
  need_limits
  local inputs arguments=()
  mapfile -t inputs < <(table_inputs)
  if is_current "$(table_file)" "${inputs[@]}"; then
    say "the table $(table_file) is kept; nothing it follows from has changed"
    if [[ -s $(shapes_file) && $(digest "$(shapes_file)") != "$(planned_recording)" ]]; then
      say "there are $(wc -l <"$(shapes_file)") recorded steps; 'launch.sh --again plan warmup' plans for them"
    fi
    return
  fi
  check_state
  mapfile -t arguments < <(plan_options)
  arguments+=(--graphs-budget "$GRAPHS_BUDGET" --max-seconds "$WARMUP_SECONDS")
  [[ -z $WARMUP_GIB ]] || arguments+=(--max-gib "$WARMUP_GIB")
  keep_recording
  if [[ -s $(shapes_file) && -z ${IS_PUT_ASIDE:-} ]]; then
    say "plans for the $(wc -l <"$(shapes_file)") lines of the recording $(shapes_file)"
    arguments+=(--from-shapes "$(shapes_file)")
  else
    say "plans for a stated guess about traffic; RECORD_SHAPES=1 records the real one for the next plan"
  fi
  # A plan that does not end must not leave its table beside the inputs of the last one.
  [[ -n $IS_DRY ]] || rm -f "$(table_file).inputs"
  run hpu-duo plan --model "$(model_path)" "${arguments[@]}" --out "$(table_file)" ||
    stop "no table was planned, for the reason above; GRAPHS_BUDGET, WARMUP_SECONDS and WARMUP_GIB bound it, and if the recording is to blame, remove $(shapes_file)"
  note_inputs "$(table_file)" "${inputs[@]}"
}

# Puts a recording aside that was made under other limits: its steps may not occur within these.
keep_recording() {
  local recording inputs
  recording=$(shapes_file)
  mapfile -t inputs < <(recording_inputs)
  [[ -f $recording.inputs && $(<"$recording.inputs") != "$(printf '%s\n' "${inputs[@]}")" ]] || return 0
  if [[ -s $recording ]]; then
    say "the recording $recording was made under other limits ($(changed_inputs "$recording" "${inputs[@]}")): it is kept as $recording.old"
    IS_PUT_ASIDE=1
    [[ -n $IS_DRY ]] || mv "$recording" "$recording.old"
  fi
  [[ -n $IS_DRY ]] || rm -f "$recording.inputs"
}

recording_inputs() {
  limit_options | paste -d ' ' - -
  printf '%s\n' "MODEL=$MODEL"
}

table_inputs() {
  plan_options | paste -d ' ' - -
  printf '%s\n' "GRAPHS_BUDGET=$GRAPHS_BUDGET" "WARMUP_SECONDS=$WARMUP_SECONDS" "WARMUP_GIB=$WARMUP_GIB" \
    "MODEL=$MODEL" "recording=$(planned_recording)"
}

# The recording a table was planned from stays the same until --again: it grows with every step that is served.
planned_recording() {
  if [[ -z $IS_AGAIN && -f $(table_file).inputs ]]; then
    sed -n 's/^recording=//p' "$(table_file).inputs"
  else
    digest "$(shapes_file)"
  fi
}

step_warmup() {
  need_limits
  local inputs arguments=()
  mapfile -t inputs < <(warm_inputs)
  if is_current "$(manifest_file)" "${inputs[@]}"; then
    say "warm already: $(manifest_file) was made with these settings and this software"
    return
  fi
  check_state
  [[ -n $IS_DRY || -s $(table_file) ]] || stop "no table has been planned yet: run 'launch.sh plan' first"
  mapfile -t arguments < <(engine_options)
  arguments+=(--buckets "$(table_file)" --max-seconds "$WARMUP_SECONDS" --manifest "$(manifest_file)")
  [[ -z $WARMUP_GIB ]] || arguments+=(--max-gib "$WARMUP_GIB")
  # A manifest of other settings would be refused, and its costs are of no use.
  if has_inputs "$(manifest_file).begun" "${inputs[@]}" && [[ -s $(manifest_file) ]]; then
    say "goes on with the warm-up of $(manifest_file), which did not end"
  elif [[ -z $IS_DRY && -f $(manifest_file) ]]; then
    say "replaces $(manifest_file) (changed: $(changed_inputs "$(manifest_file)" "${inputs[@]}"))"
    mv "$(manifest_file)" "$(manifest_file).old"
    rm -f "$(manifest_file).inputs"
  fi
  note_inputs "$(manifest_file).begun" "${inputs[@]}"
  run hpu-duo warmup "${arguments[@]}" ||
    stop "the warm-up has not ended well, for the reason above: raise WARMUP_SECONDS or WARMUP_GIB, lower GRAPHS_BUDGET, or make room in $STATE_DIR"
  note_inputs "$(manifest_file)" "${inputs[@]}"
  IS_JUST_WARMED=1
}

warm_inputs() {
  engine_options | awk '/^--/ { if (line) print line; line = $0; next } { line = line " " $0 } END { print line }'
  printf 'table=%s\nconfig=%s\nlazy=%s\n' "$(digest "$(table_file)")" "$(digest "$(model_path)/config.json")" \
    "${PT_HPU_LAZY_MODE:-}"
  software
}

# Options of the engine, the same for warmup and serve.
engine_options() {
  printf '%s\n' --model "$(model_path)" --device "$DEVICE" --dtype "$DTYPE" --graphs "$GRAPHS" \
    --device-memory-utilization "$DEVICE_MEMORY_UTILIZATION"
  limit_options
  if ((TENSOR_PARALLEL_SIZE > 1)); then
    printf '%s\n' --tensor-parallel-size "$TENSOR_PARALLEL_SIZE" --retrieval-parallel "$CHOSEN_RETRIEVAL"
  fi
  if [[ $PREFIX_CACHING == 0 ]]; then printf '%s\n' --no-enable-prefix-caching; fi
  if [[ -n $PATTERN ]]; then printf '%s\n' --pattern "$PATTERN"; fi
  if [[ -n $SPARSITY ]]; then printf '%s\n' --sparsity "$SPARSITY"; fi
}

# Refuses a manifest of other settings in one sentence, without reading weights.
need_manifest() {
  [[ -s $(manifest_file) ]] || stop "nothing has been warmed up yet: run 'launch.sh warmup' first"
  local inputs
  mapfile -t inputs < <(warm_inputs)
  [[ -f $(manifest_file).inputs && $(<"$(manifest_file).inputs") == "$(printf '%s\n' "${inputs[@]}")" ]] ||
    stop "the manifest $(manifest_file) is stale (changed: $(changed_inputs "$(manifest_file)" "${inputs[@]}")): run 'launch.sh plan warmup'"
}

step_verify() {
  need_limits
  local arguments=()
  if [[ -n $IS_DRY && ! -s $(manifest_file) ]]; then
    say "there is no manifest to verify yet"
    return
  fi
  if [[ -n ${IS_JUST_WARMED:-} && -z $IS_DRY ]]; then
    say "the manifest was written just now"
    return
  fi
  need_manifest
  mapfile -t arguments < <(engine_options)
  run hpu-duo warmup "${arguments[@]}" --replay "$(manifest_file)" --dry-run ||
    stop "the manifest $(manifest_file) does not fit what would be served, for the reason above: run 'launch.sh --again plan warmup'"
}
