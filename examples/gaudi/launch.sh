#!/usr/bin/env bash
# Take a server from nothing to the first token, step by step: check, limits, plan, warmup, verify, serve.
# Written from public sources and run on the simulated device; it has never run on a card.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib/say.sh
source "$HERE/lib/say.sh"
# shellcheck source=lib/settings.sh
source "$HERE/lib/settings.sh"
# shellcheck source=lib/children.sh
source "$HERE/lib/children.sh"
# shellcheck source=lib/state.sh
source "$HERE/lib/state.sh"
# shellcheck source=lib/card.sh
source "$HERE/lib/card.sh"
# shellcheck source=lib/check.sh
source "$HERE/lib/check.sh"
# shellcheck source=lib/limits.sh
source "$HERE/lib/limits.sh"
# shellcheck source=lib/table.sh
source "$HERE/lib/table.sh"
# shellcheck source=lib/server.sh
source "$HERE/lib/server.sh"

readonly ORDER=(check limits plan warmup verify serve)

usage() {
  cat <<'TEXT'
Usage: launch.sh [--env FILE] [--dry-run] [--again] [STEP...]

Steps, in this order; all of them if none is named:
  check    driver, cards, huge pages, cores, packages, room on the volume
  limits   how long and how many requests may be, by hpu-duo capacity
  plan     the shapes to capture, from a recording if there is one
  warmup   capture them within a budget, into the recipe cache; writes the manifest
  verify   compare the manifest with what would be served
  serve    serve until SIGTERM

  --env FILE   settings, one NAME=value a line; a variable of the environment comes before the file's
  --dry-run    say what would be done; nothing is written, captured or served
  --again      do limits, plan and warmup anew, even if nothing has changed since the last time
TEXT
}

main() {
  local file="" steps=() step
  IS_DRY="" IS_AGAIN=""
  while (($#)); do
    case $1 in
      --env)
        (($# > 1)) || stop "expected a file behind --env, such as env/gaudi3.env"
        file=$2
        shift
        ;;
      --env=*) file=${1#--env=} ;;
      --dry-run) IS_DRY=1 ;;
      --again) IS_AGAIN=1 ;;
      -h | --help)
        usage
        return
        ;;
      check | limits | plan | warmup | verify | serve) steps+=("$1") ;;
      *) stop "expected a step (${ORDER[*]}) or an option (--env, --dry-run, --again), got '$1'" ;;
    esac
    shift
  done
  ((${#steps[@]})) || steps=("${ORDER[@]}")
  readonly IS_DRY IS_AGAIN
  end_at_signals
  read_settings "$file"
  for step in "${steps[@]}"; do
    "step_$step"
  done
}

main "$@"
