#!/usr/bin/env bash
# Send the same load to two servers, one after the other, and print one table with a row for each.
# Made for this server and vllm-gaudi on the same card: the second is started when the first has been stopped, so
# give each its turn with --only ours or --only theirs, and --table afterwards.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
Usage: bench.sh [--ours URL] [--theirs URL] [--only ours|theirs] [--out DIR] [-- OPTIONS of hpu-duo bench serve]

  --ours URL     this server, http://127.0.0.1:8000 unless said otherwise
  --theirs URL   the server to compare with, such as vllm-gaudi, http://127.0.0.1:8001 unless said otherwise
  --only NAME    measure one of them now; the table has both once both have been measured
  --out DIR      where the results lie, ours.json and theirs.json; ./bench unless said otherwise

Without options behind -- : --num-prompts 200 --request-rate 4 --input-len 1024 --output-len 128 --ignore-eos.
Both rows have to come from the same options; the table says so where they do not.
TEXT
}

stop() {
  printf 'bench: %s\n' "$*" >&2
  exit 2
}

measure() {
  local name=$1 url=$2
  shift 2
  printf 'bench: %s at %s\n' "$name" "$url" >&2
  hpu-duo bench serve --base-url "$url" --out "$OUT/$name.json" --metadata "server=$name" "$@" >/dev/null ||
    stop "$name at $url was not measured, for the reason above"
}

main() {
  local ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:8001 only="" options=()
  OUT=bench
  while (($#)); do
    case $1 in
      --ours | --theirs | --only | --out)
        (($# > 1)) || stop "expected a value behind $1"
        case $1 in
          --ours) ours=$2 ;;
          --theirs) theirs=$2 ;;
          --only) only=$2 ;;
          --out) OUT=$2 ;;
        esac
        shift 2
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
      *) stop "expected --ours, --theirs, --only, --out, or options of hpu-duo bench serve behind --, got '$1'" ;;
    esac
  done
  [[ $only =~ ^(ours|theirs|)$ ]] || stop "expected --only ours or --only theirs, got '$only'"
  ((${#options[@]})) || options=(--num-prompts 200 --request-rate 4 --input-len 1024 --output-len 128 --ignore-eos)
  mkdir -p "$OUT" || stop "--out $OUT cannot be made: name another directory"
  [[ $only == theirs ]] || measure ours "$ours" "${options[@]}"
  [[ $only == ours ]] || measure theirs "$theirs" "${options[@]}"
  python3 "$HERE/bench_table.py" "$OUT/ours.json" "$OUT/theirs.json"
}

main "$@"
