# Step check: what a deployment needs of the machine, told, and refused where it is missing.
# shellcheck shell=bash

step_check() {
  check_packages
  check_state
  if [[ $DEVICE == hpu ]]; then
    check_driver
    read_cards
    choose_card
    tell_card
    check_huge_pages
    check_device
  else
    say "DEVICE=$DEVICE: driver, cards, huge pages and cores are not looked at"
  fi
}

check_packages() {
  command -v hpu-duo >/dev/null ||
    stop "hpu-duo is not on the path: pip install '$(cd "$HERE/../.." && pwd)[serve]' in the environment that has the vendor's torch, or take the image of the Dockerfile"
  say "$(software | paste -s -d ' ')"
  python3 -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' \
    fastapi uvicorn openai prometheus_client ||
    stop "packages of the server are missing: $(python3 -m hpu_duo.extras serve)"
}

check_driver() {
  local file=$SYSTEM_ROOT/sys/module/habanalabs/version
  if [[ -r $file ]]; then
    say "driver $(<"$file")"
  else
    say "note: $file is not there; a container may hide it, and hl-smi is asked instead"
  fi
}

tell_card() {
  local driver plugin cores
  driver=$(card_field "$CARD" driver_version)
  say "card $(card_field "$CARD" index), $(card_field "$CARD" name), $(card_field "$CARD" memory.used) of $(card_field "$CARD" memory.total) MiB in use, driver $driver"
  plugin=$(software | sed -n 's/^habana-torch-plugin=//p')
  if [[ $plugin == none ]]; then
    stop "the package habana-torch-plugin is missing: hpu-duo has to be installed into the vendor's image or environment, beside its torch"
  fi
  [[ $(cut -d. -f1,2 <<<"$driver") == "$(cut -d. -f1,2 <<<"$plugin")" ]] ||
    say "note: driver $driver and habana-torch-plugin $plugin are of different releases; the vendor's support matrix has them equal"
  cores=$(card_cores "$CARD")
  say "NUMA node $(card_node "$CARD" | grep . || echo unknown), cores ${cores:-unknown}"
}

check_huge_pages() {
  local file=$SYSTEM_ROOT/proc/meminfo total size
  total=$(awk '/^HugePages_Total:/ { print $2 }' "$file")
  size=$(awk '/^Hugepagesize:/ { print $2 }' "$file")
  say "${total:-0} huge pages of ${size:-0} KiB"
  ((${total:-0} >= 10#$MIN_HUGE_PAGES)) ||
    stop "MIN_HUGE_PAGES=$MIN_HUGE_PAGES, and there are ${total:-0}: sudo sysctl -w vm.nr_hugepages=$MIN_HUGE_PAGES"
}

# Asks the package itself, which imports the vendor's.
check_device() {
  local reason
  reason=$(hpu-duo doctor --json 2>/dev/null | python3 -c '
import json, sys
for fact in json.load(sys.stdin):
    if (fact["topic"], fact["name"]) == ("devices", "hpu") and not fact["is_usable"]:
        print(fact["detail"])') || stop "hpu-duo doctor has failed: run it by itself to see why"
  [[ -z $reason ]] || stop "the device hpu is not usable ($reason): run 'hpu-duo doctor', and 'hpu-duo selftest --device hpu' once it is"
}
