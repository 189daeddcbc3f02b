# The cards of this machine, as the vendor's hl-smi and the kernel tell of them.
# shellcheck shell=bash

# Beginning of the paths of /proc and /sys; tests have a tree of their own.
SYSTEM_ROOT=${SYSTEM_ROOT:-}

readonly CARD_FIELDS=index,module_id,name,bus_id,driver_version,memory.used,memory.total
readonly HL_SMI_SECONDS=60

# Reads the cards into CARDS, a line of fields each, without spaces around commas and without units.
read_cards() {
  local told
  command -v hl-smi >/dev/null ||
    stop "hl-smi is not on the path: install the driver and tools of the Gaudi software, or start the container with --runtime=habana"
  told=$(timeout "$HL_SMI_SECONDS" hl-smi -Q "$CARD_FIELDS" -f csv,noheader 2>&1) ||
    stop "hl-smi finds no card it can talk to (${told:-no answer within $HL_SMI_SECONDS s}): load the driver with 'sudo modprobe habanalabs', and look at 'dmesg | grep habanalabs'"
  mapfile -t CARDS < <(grep -E '^[0-9]+ *,' <<<"$told" | sed -e 's/ *, */,/g' -e 's/ MiB//g')
  ((${#CARDS[@]})) ||
    stop "hl-smi lists no card: HABANA_VISIBLE_DEVICES is '${HABANA_VISIBLE_DEVICES:-not set}'; in a container it has to name a card or be 'all'"
}

# Field of a card by its name in CARD_FIELDS.
card_field() {
  local names index
  IFS=, read -r -a names <<<"$CARD_FIELDS"
  for index in "${!names[@]}"; do
    [[ ${names[index]} == "$2" ]] && cut -d, -f$((index + 1)) <<<"$1" && return
  done
}

# Gaudi 2 or 3 by the name of the card; nothing for a name that is not known.
generation() {
  case $1 in
    *HL-20[0-9]*) printf 'gaudi1' ;;
    *HL-225* | *HL-288*) printf 'gaudi2' ;;
    *HL-3[0-9][0-9]*) printf 'gaudi3' ;;
  esac
}

# Chooses the visible card with the least memory in use, or as many as there are ranks of all replicas, and names
# them for this process and its children.
choose_card() {
  local card used total least="" found
  ((${#CARDS[@]} >= NUM_CARDS)) ||
    stop "TENSOR_PARALLEL_SIZE=$TENSOR_PARALLEL_SIZE and REPLICAS=$REPLICAS take $NUM_CARDS cards, and ${#CARDS[@]} are visible: make more visible, or take the env file of one card"
  for card in "${CARDS[@]}"; do
    found=$(generation "$(card_field "$card" name)")
    [[ -z $found || $found == "$HARDWARE" ]] ||
      stop "HARDWARE=$HARDWARE, but card $(card_field "$card" index) is of ${found/gaudi/Gaudi } ($(card_field "$card" name)): take the env file of that card, if there is one"
    used=$(card_field "$card" memory.used)
    if [[ -z $least || $used -lt $least ]]; then
      least=$used CARD=$card
    fi
  done
  total=$(card_field "$CARD" memory.total)
  ((least * 4 <= total)) ||
    stop "every visible card has more than a quarter of its memory in use ($least of $total MiB at best): end the process that 'sudo hl-smi' shows, or make another card visible"
  if ((NUM_CARDS > 1)); then
    choose_cards
    return
  fi
  if ((${#CARDS[@]} > 1)) && [[ -z ${HABANA_VISIBLE_MODULES:-} && -z ${HLS_MODULE_ID:-} ]]; then
    HABANA_VISIBLE_MODULES=$(card_field "$CARD" module_id)
    export HABANA_VISIBLE_MODULES
    say "takes module $HABANA_VISIBLE_MODULES of ${#CARDS[@]} cards, the one with the most free memory"
  fi
}

# Of several cards, those with the least memory in use, in the order of their modules: a process for each binds
# itself to cores of its own.
choose_cards() {
  local card modules=() used
  [[ -z ${HABANA_VISIBLE_MODULES:-} ]] || return 0
  [[ -z ${HLS_MODULE_ID:-} ]] ||
    stop "HLS_MODULE_ID=$HLS_MODULE_ID names one card for $NUM_CARDS processes: name them in HABANA_VISIBLE_MODULES, or none"
  while IFS= read -r card; do
    used=$(card_field "$card" memory.used)
    ((used * 4 <= $(card_field "$card" memory.total))) ||
      stop "card $(card_field "$card" index) is one of the $NUM_CARDS with the most free memory, and has more than a quarter in use ($used MiB): end the process that 'sudo hl-smi' shows"
    modules+=("$(card_field "$card" module_id)")
  done < <(by_free_memory | head -n "$NUM_CARDS")
  HABANA_VISIBLE_MODULES=$(printf '%s\n' "${modules[@]}" | sort -n | paste -s -d ,)
  export HABANA_VISIBLE_MODULES
  say "takes modules $HABANA_VISIBLE_MODULES of ${#CARDS[@]} cards, those with the most free memory"
}

# The cards, those with the least memory in use first.
by_free_memory() {
  local card
  for card in "${CARDS[@]}"; do
    printf '%s\t%s\n' "$(card_field "$card" memory.used)" "$card"
  done | sort -n -s -k 1,1 | cut -f 2
}

# NUMA node of a card; nothing where the kernel does not say.
card_node() {
  local bus file node=""
  bus=$(card_field "$1" bus_id)
  file=$SYSTEM_ROOT/sys/bus/pci/devices/${bus,,}/numa_node
  if [[ -r $file ]]; then node=$(<"$file"); fi
  if [[ $node =~ ^[0-9]+$ ]]; then printf '%s' "$node"; fi
}

# Cores of the card's NUMA node; nothing where there is nothing to bind to.
card_cores() {
  local node file
  node=$(card_node "$1")
  file=$SYSTEM_ROOT/sys/devices/system/node/node$node/cpulist
  if [[ -n $node && -r $file ]]; then tr -d '[:space:]' <"$file"; fi
}
