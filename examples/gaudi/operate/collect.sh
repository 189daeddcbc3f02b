#!/usr/bin/env bash
# Collect what a report of a problem needs in one archive: versions, doctor, self-test, hl-smi, settings, limits,
# manifest, statistics and logs. No prompt, answer, key or token goes into it; redact.py sees every log line.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
Usage: collect.sh [--env FILE] [--url URL] [--log FILE]... [--stages LIST] [--out FILE]

  --env FILE      settings of the deployment; its STATE_DIR and DEVICE are looked at
  --url URL       server to ask for /stats, /metrics, /version; http://127.0.0.1:8000 unless said otherwise
  --log FILE      log to take the last 5,000 lines of; repeat for several. The journal of hpu-duo.service comes along
  --stages LIST   stages of hpu-duo selftest; machine unless said otherwise, all takes minutes and a free card
  --out FILE      archive to write; ./hpu-duo-report.tar.gz unless said otherwise
TEXT
}

stop() {
  printf 'collect: %s\n' "$*" >&2
  exit 2
}

# Runs a command for a file of the report; a command that fails or hangs is part of it.
keep() {
  local file=$1 status=0
  shift
  timeout 300 "$@" >"$REPORT/$file" 2>&1 || status=$?
  if ((status)); then printf '\n%s ended with exit code %s\n' "$*" "$status" >>"$REPORT/$file"; fi
}

setting() {
  local value=${!2:-}
  [[ -n $value || -z $1 ]] || value=$(sed -n "s/^$2=//p" "$1" | tail -n 1)
  printf '%s' "${value:-$3}"
}

collect_cards() {
  if command -v hl-smi >/dev/null; then
    keep hl-smi.txt hl-smi
    keep hl-smi-cards.csv hl-smi -Q index,module_id,name,bus_id,driver_version,memory.used,memory.total,temperature.aip -f csv
  else
    echo "hl-smi is not on the path" >"$REPORT/hl-smi.txt"
  fi
  (dmesg 2>&1 | grep -i habanalabs | tail -n 200) >"$REPORT/dmesg.txt" || echo "nothing of habanalabs" >"$REPORT/dmesg.txt"
}

collect_server() {
  local url=$1 path
  for path in stats metrics version; do
    curl --silent --show-error --max-time 10 "$url/$path" >"$REPORT/$path.txt" 2>&1 || true
  done
}

collect_logs() {
  local log name number=0
  for log in "$@"; do
    [[ -r $log ]] || stop "expected --log to name a file that can be read, got '$log'"
    number=$((number + 1))
    name=$(basename "$log")
    tail -n 5000 "$log" | python3 "$HERE/redact.py" >"$REPORT/log-$number-$name"
  done
  if command -v journalctl >/dev/null; then
    (timeout 60 journalctl --unit hpu-duo --lines 5000 --output cat --no-pager 2>/dev/null || true) | python3 "$HERE/redact.py" >"$REPORT/journal.txt"
  fi
}

main() {
  local file="" url=http://127.0.0.1:8000 logs=() stages=machine out=hpu-duo-report.tar.gz state device work
  while (($#)); do
    case $1 in
      --env | --url | --log | --stages | --out)
        (($# > 1)) || stop "expected a value behind $1"
        case $1 in
          --env) file=$2 ;;
          --url) url=$2 ;;
          --log) logs+=("$2") ;;
          --stages) stages=$2 ;;
          --out) out=$2 ;;
        esac
        shift 2
        ;;
      -h | --help)
        usage
        return
        ;;
      *) stop "expected --env, --url, --log, --stages or --out, got '$1'" ;;
    esac
  done
  [[ -z $file || -r $file ]] || stop "expected --env to name a file that can be read, got '$file'"
  command -v hpu-duo >/dev/null || stop "hpu-duo is not on the path: run this in the container or environment of the server"
  state=$(setting "$file" STATE_DIR /var/lib/hpu-duo)
  device=$(setting "$file" DEVICE hpu)
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$work'" EXIT
  REPORT=$work/hpu-duo-report
  mkdir "$REPORT"
  keep system.txt uname -a
  keep packages.txt python3 -m pip list --format=freeze
  keep doctor.json hpu-duo doctor --json
  if [[ $stages == all ]]; then
    keep selftest.txt hpu-duo selftest --device "$device" --output "$REPORT"
  else
    keep selftest.txt hpu-duo selftest --device "$device" --only "$stages" --output "$REPORT"
  fi
  collect_cards
  collect_server "$url"
  collect_logs "${logs[@]}"
  [[ -z $file ]] || python3 "$HERE/redact.py" <"$file" >"$REPORT/settings.env"
  for file in limits.env table.txt warm.json; do
    if [[ -r $state/$file ]]; then cp "$state/$file" "$REPORT/"; fi
  done
  tar -czf "$out" -C "$work" hpu-duo-report || stop "--out $out cannot be written: name another file"
  printf '%s\n' "$out"
}

main "$@"
