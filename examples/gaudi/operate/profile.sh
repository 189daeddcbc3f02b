#!/usr/bin/env bash
# Profile N steps of a deployment: serves it with the profiler on, sends a load, waits for the trace and stops.
# The card has to be free. Designed from public sources; the vendor's profiler has never run with it.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
Usage: profile.sh --env FILE [--steps N] [--out DIR] [--hardware-trace] [-- OPTIONS of hpu-duo bench serve]

  --env FILE         settings of the deployment, warmed up before: launch.sh --env FILE warmup
  --steps N          steps to profile; 20 unless said otherwise
  --out DIR          where the trace goes; ./profile unless said otherwise
  --hardware-trace   let the vendor's profiler record the engines of the card too, which makes traces large

Without options behind -- the load is --num-prompts 8 --request-rate inf --input-len 128 --output-len 64.
TEXT
}

stop() {
  printf 'profile: %s\n' "$*" >&2
  exit 2
}

# Chooses what the vendor's profiler records, where it is installed.
configure_vendor() {
  local hardware=$1
  if command -v hl-prof-config >/dev/null; then
    hl-prof-config --use-template profile_api --hw-trace "$hardware" >/dev/null ||
      stop "hl-prof-config has failed: run it by itself, or without --hardware-trace"
    export HABANA_PROFILE=1
  else
    printf 'profile: hl-prof-config is not on the path, so the vendor'\''s own profiler stays off\n' >&2
  fi
}

# Waits until the server tells its address and is ready.
await_ready() {
  local log=$1 server=$2
  until URL=$(sed -n 's/^hpu-duo: serving .* at \([^ ,]*\).*/\1/p' "$log" | head -n 1) && [[ -n $URL ]] &&
    curl --silent --fail --max-time 5 --output /dev/null "$URL/ready"; do
    kill -0 "$server" 2>/dev/null || stop "the server has ended: $(tail -n 1 "$log")"
    sleep 1
  done
}

main() {
  local file="" steps=20 out=profile hardware=off options=() server log
  while (($#)); do
    case $1 in
      --env | --steps | --out)
        (($# > 1)) || stop "expected a value behind $1"
        case $1 in
          --env) file=$2 ;;
          --steps) steps=$2 ;;
          --out) out=$2 ;;
        esac
        shift 2
        ;;
      --hardware-trace)
        hardware=on
        shift
        ;;
      -h | --help)
        usage
        return
        ;;
      --)
        shift
        options=("$@")
        break
        ;;
      *) stop "expected --env, --steps, --out, --hardware-trace, or options of hpu-duo bench serve behind --, got '$1'" ;;
    esac
  done
  [[ -n $file ]] || stop "expected --env with the settings of the deployment, such as env/gaudi3.env"
  [[ $steps =~ ^[1-9][0-9]*$ ]] || stop "expected --steps to be a number of at least 1, got '$steps'"
  ((${#options[@]})) || options=(--num-prompts 8 --request-rate inf --input-len 128 --output-len 64)
  mkdir -p "$out" || stop "--out $out cannot be made: name another directory"
  out=$(cd "$out" && pwd)
  log=$out/serve.log
  configure_vendor "$hardware"
  export PROFILE_STEPS=$steps PROFILE_DIR=$out
  "$HERE/../launch.sh" --env "$file" serve >/dev/null 2>"$log" &
  server=$!
  # shellcheck disable=SC2064  # the process of now
  trap "kill -TERM $server 2>/dev/null || true" EXIT
  await_ready "$log" "$server"
  hpu-duo bench serve --base-url "$URL" "${options[@]}" >/dev/null || stop "the load was not served, see $log"
  kill -TERM "$server"
  wait "$server" || stop "the server has not ended well, see $log"
  trap - EXIT
  compgen -G "$out/*.pt.trace.json.gz" || stop "$(grep 'no profile was written' "$log" || echo "no profile was written, see $log"): send a larger load behind --"
}

main "$@"
