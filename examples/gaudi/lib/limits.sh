# Step limits: how long and how many requests may be, by hpu-duo capacity, and why.
# shellcheck shell=bash

step_limits() {
  local inputs
  mapfile -t inputs < <(limit_inputs)
  if is_current "$(limits_file)" "${inputs[@]}"; then
    say "limits are those of $(limits_file); nothing they follow from has changed"
    load_limits
    return
  fi
  check_state
  local told chosen
  told=$(choose_limits) || stop "no limits were chosen, for the reason above"
  chosen=$(grep -v '^#' <<<"$told")
  sed -n 's/^# //p' <<<"$told" | while IFS= read -r line; do say "$line"; done
  if [[ -n $IS_DRY ]]; then
    take_limits <<<"$chosen"
    return
  fi
  write_lines "$(limits_file)" "$told"
  note_inputs "$(limits_file)" "${inputs[@]}"
  load_limits
}

limit_inputs() {
  printf '%s\n' "MODEL=$MODEL" "HARDWARE=$HARDWARE" "PATTERN=$PATTERN" "SPARSITY=$SPARSITY" "MAX_MODEL_LEN=$MAX_MODEL_LEN" \
    "MAX_NUM_SEQS=$MAX_NUM_SEQS" "MAX_NUM_BATCHED_TOKENS=$MAX_NUM_BATCHED_TOKENS" "BLOCK_SIZE=$BLOCK_SIZE" \
    "NUM_BLOCKS=$NUM_BLOCKS" "DEVICE_MEMORY_UTILIZATION=$DEVICE_MEMORY_UTILIZATION" "TYPICAL_LEN=$TYPICAL_LEN" \
    "PREFIX_CACHING=$PREFIX_CACHING" "TENSOR_PARALLEL_SIZE=$TENSOR_PARALLEL_SIZE" "RETRIEVAL_PARALLEL=$RETRIEVAL_PARALLEL" \
    "LONG_NUM_SEQS=$LONG_NUM_SEQS" "MOST_NUM_SEQS=$MOST_NUM_SEQS"
}

# Options of capacity and plan that say which heads stream.
head_options() {
  printf '%s\n' --sparsity "${SPARSITY:-0}"
  if [[ -n $PATTERN ]]; then printf '%s\n' --pattern "$PATTERN"; fi
}

# Prints the limits as NAME=value and the reasons as comments.
choose_limits() {
  local heads arguments
  mapfile -t heads < <(head_options)
  arguments=(--long-num-seqs "$LONG_NUM_SEQS" --most-num-seqs "$MOST_NUM_SEQS" --typical-len "$TYPICAL_LEN"
    --num-devices "$TENSOR_PARALLEL_SIZE" --retrieval-parallel "$RETRIEVAL_PARALLEL")
  [[ -z $MAX_MODEL_LEN ]] || arguments+=(--max-model-len "$MAX_MODEL_LEN")
  [[ -z $MAX_NUM_SEQS ]] || arguments+=(--max-num-seqs "$MAX_NUM_SEQS")
  [[ -z $NUM_BLOCKS ]] || arguments+=(--num-blocks "$NUM_BLOCKS")
  [[ $PREFIX_CACHING == 0 ]] || arguments+=(--keeps-prefixes)
  python3 "$HERE/lib/choose_limits.py" "${arguments[@]}" --model "$(model_path)" --hardware "$HARDWARE" "${heads[@]}" \
    --kv-cache-dtype bf16 --block-size "$BLOCK_SIZE" --max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS" \
    --device-memory-utilization "$DEVICE_MEMORY_UTILIZATION"
}

# Takes the limits that were chosen; without them the step that makes them is named.
load_limits() {
  [[ -s $(limits_file) ]] || stop "no limits have been chosen yet: run 'launch.sh limits' first"
  take_limits < <(grep -v '^#' "$(limits_file)")
}

take_limits() {
  local name value
  # Files of earlier versions have no line of it.
  CHOSEN_RETRIEVAL=$RETRIEVAL_PARALLEL
  while IFS='=' read -r name value; do
    case $name in
      MAX_MODEL_LEN) CHOSEN_MODEL_LEN=$value ;;
      MAX_NUM_SEQS) CHOSEN_NUM_SEQS=$value ;;
      NUM_BLOCKS) CHOSEN_NUM_BLOCKS=$value ;;
      RETRIEVAL_PARALLEL) CHOSEN_RETRIEVAL=$value ;;
      *) stop "$(limits_file) holds '$name', which is no limit: delete it and run 'launch.sh limits'" ;;
    esac
  done
}

# The limits of this start, chosen now or before.
need_limits() {
  if [[ -z ${CHOSEN_MODEL_LEN:-} ]]; then
    local inputs
    mapfile -t inputs < <(limit_inputs)
    load_limits
    [[ $(<"$(limits_file).inputs") == "$(printf '%s\n' "${inputs[@]}")" ]] ||
      stop "the limits in $(limits_file) were chosen for other settings ($(changed_inputs "$(limits_file)" "${inputs[@]}")): run 'launch.sh limits plan warmup'"
  fi
}

limit_options() {
  options_of_blocks "$BLOCK_SIZE"
}

# The same for plan: where cards share the tokens of retrieval heads, a block of the table has a part on each card.
plan_options() {
  if [[ $CHOSEN_RETRIEVAL == context ]]; then
    options_of_blocks $((BLOCK_SIZE * TENSOR_PARALLEL_SIZE))
  else
    options_of_blocks "$BLOCK_SIZE"
  fi
}

options_of_blocks() {
  printf '%s\n' --max-model-len "$CHOSEN_MODEL_LEN" --max-num-seqs "$CHOSEN_NUM_SEQS" \
    --max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS" --block-size "$1" --num-blocks "$CHOSEN_NUM_BLOCKS"
}
