# What outlives a start: the limits that were chosen, the table, the manifest, the recipes, the recording.
# shellcheck shell=bash

limits_file() { printf '%s/limits.env' "$STATE_DIR"; }
table_file() { printf '%s/table.txt' "$STATE_DIR"; }
manifest_file() { printf '%s/warm.json' "$STATE_DIR"; }
shapes_file() { printf '%s/shapes.jsonl' "$STATE_DIR"; }

# The user by name, or by number where it has no name, as in a container with an arbitrary one.
whose() { id -un 2>/dev/null || printf 'user %s' "$(id -u)"; }

# Makes the directory and looks for room in it.
check_state() {
  [[ -z ${HAS_ROOM:-} ]] || return 0
  local place=$STATE_DIR free
  if [[ -z $IS_DRY ]]; then
    mkdir -p "$STATE_DIR" 2>/dev/null || stop "STATE_DIR=$STATE_DIR cannot be made: make it and give it to $(whose), or name another directory"
    [[ -w $STATE_DIR ]] || stop "STATE_DIR=$STATE_DIR cannot be written to: give it to $(whose), or name another directory"
  fi
  while [[ ! -d $place ]]; do place=$(dirname "$place"); done
  free=$(df -Pk "$place" | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= 10#$MIN_FREE_GIB)) ||
    stop "STATE_DIR=$STATE_DIR has $free GiB left and recipes, table and recording need $MIN_FREE_GIB: make room, name another volume, or lower MIN_FREE_GIB"
  say "state in $STATE_DIR, $free GiB free"
  HAS_ROOM=1
}

# Whether a file was made from the same inputs; $1 is the file, the rest are the inputs.
is_current() {
  [[ -s $1 ]] && has_inputs "$@"
}

has_inputs() {
  [[ -z $IS_AGAIN && -f $1.inputs && $(<"$1.inputs") == "$(printf '%s\n' "${@:2}")" ]]
}

note_inputs() {
  [[ -n $IS_DRY ]] || write_lines "$1.inputs" "${@:2}"
}

# Writes a file whole or not at all.
write_lines() {
  { printf '%s\n' "${@:2}" >"$1.new" && mv "$1.new" "$1"; } 2>/dev/null ||
    stop "$1 cannot be written: make room in $STATE_DIR, or name another one"
}

# Lines of the inputs that are no longer the same, as "before -> now".
changed_inputs() {
  diff <(cat "$1.inputs" 2>/dev/null) <(printf '%s\n' "${@:2}") |
    awk '/^</ { before = before sep substr($0, 3); sep = ", " } /^>/ { now = now with substr($0, 3); with = ", " }
         END { print (before == "" ? "nothing" : before) " -> " (now == "" ? "nothing" : now) }'
}

digest() {
  if [[ -f $1 ]]; then sha256sum "$1" | cut -c 1-16; else printf 'none'; fi
}

# The directory of the model, or its name on the hub.
model_path() {
  if [[ $MODEL == builtin ]]; then
    python3 -c 'from hpu_duo.builtin import MODEL_DIR; print(MODEL_DIR)'
  else
    printf '%s\n' "$MODEL"
  fi
}

# Versions whose change makes recipes useless: this package, torch, transformers, the vendor's plug-in and driver.
software() {
  python3 - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version

for name in ("hpu-duo", "torch", "transformers", "habana-torch-plugin"):
    try:
        print(f"{name}={version(name)}")
    except PackageNotFoundError:
        print(f"{name}=none")
PYTHON
}
