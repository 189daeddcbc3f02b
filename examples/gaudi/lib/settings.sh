# Settings: the defaults of a deployment, which stand here and nowhere else, and how an env file is read.
# shellcheck shell=bash
# shellcheck disable=SC2034  # other files of this folder read them

# Each setting with its default. env/variables.yaml says what it means and who reads it.
readonly DEFAULTS=(
  DEVICE=hpu
  HARDWARE=gaudi3
  MODEL=builtin
  SERVED_MODEL_NAME=
  DTYPE=auto
  TENSOR_PARALLEL_SIZE=1
  RETRIEVAL_PARALLEL=auto
  REPLICAS=1
  ROUTER=
  PATTERN=
  SPARSITY=
  MAX_MODEL_LEN=
  MAX_NUM_SEQS=
  MAX_NUM_BATCHED_TOKENS=2048
  BLOCK_SIZE=128
  NUM_BLOCKS=
  DEVICE_MEMORY_UTILIZATION=0.9
  PREFIX_CACHING=1
  TYPICAL_LEN=4096
  LONG_NUM_SEQS=4
  MOST_NUM_SEQS=128
  GRAPHS=default
  GRAPHS_BUDGET=64
  WARMUP_SECONDS=3600
  WARMUP_GIB=
  RECORD_SHAPES=1
  STATE_DIR=/var/lib/hpu-duo
  MIN_FREE_GIB=20
  RECIPE_CACHE_MB=16384
  MIN_HUGE_PAGES=0
  BIND_CORES=1
  HOST=127.0.0.1
  PORT=8000
  API_KEY_FILE=
  MAX_QUEUE=
  DRAIN_SECONDS=30
  LOG_REQUESTS=
  METRICS_NAMESPACE=hpuduo
  PROFILE_STEPS=
  PROFILE_DIR=
  SERVE_ARGS=
)

# Variables that an env file may set for others: the vendor's software, the hub, the container runtime, the network.
readonly PASSED_ON=(
  PT_HPU_LAZY_MODE PT_HPU_WEIGHT_SHARING PT_HPU_ENABLE_EAGER_CACHE PT_HPU_ENABLE_LAZY_COLLECTIVES
  PT_HPU_RECIPE_CACHE_CONFIG PT_HPU_METRICS_FILE PT_HPU_METRICS_FILE_FORMAT PT_HPU_METRICS_DUMP_TRIGGERS
  PT_ENABLE_INT64_SUPPORT FUSER_ENABLE_MULTI_THREADED_INVOCATIONS
  HABANA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES HLS_MODULE_ID HABANA_LOGS HABANA_PROFILE LOG_LEVEL_ALL
  OMPI_MCA_btl_vader_single_copy_mechanism OMP_NUM_THREADS HF_HOME HF_TOKEN HF_HUB_OFFLINE
  HCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
  HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy
)

readonly WHOLE=(
  TENSOR_PARALLEL_SIZE REPLICAS MAX_MODEL_LEN MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS BLOCK_SIZE NUM_BLOCKS TYPICAL_LEN LONG_NUM_SEQS MOST_NUM_SEQS
  GRAPHS_BUDGET WARMUP_SECONDS MIN_FREE_GIB RECIPE_CACHE_MB MIN_HUGE_PAGES PORT MAX_QUEUE DRAIN_SECONDS PROFILE_STEPS
)
readonly POSITIVE=(
  TENSOR_PARALLEL_SIZE REPLICAS MAX_MODEL_LEN MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS BLOCK_SIZE NUM_BLOCKS TYPICAL_LEN LONG_NUM_SEQS MOST_NUM_SEQS
  GRAPHS_BUDGET WARMUP_SECONDS RECIPE_CACHE_MB PROFILE_STEPS
)

# Reads the file, lets the environment come first, and checks every value.
read_settings() {
  local file=$1 pair name
  [[ -z $file ]] || read_file "$file"
  for pair in "${DEFAULTS[@]}"; do
    name=${pair%%=*}
    [[ -v $name ]] || printf -v "$name" '%s' "${pair#*=}"
  done
  check_settings
}

read_file() {
  local file=$1 line name value number=0
  [[ -f $file && -r $file ]] || stop "expected --env to name a file that can be read, got '$file': take env/gaudi2.env, env/gaudi3.env or a copy of one"
  while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    line=${line%$'\r'}
    [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
    [[ $line =~ ^([A-Za-z_][A-Za-z0-9_]*)=(.*)$ ]] ||
      stop "$file, line $number: expected NAME=value, a comment or nothing, got '$line'"
    name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
    is_known "$name" ||
      stop "$file, line $number: $name is no variable of a deployment; variables.md lists those that are"
    # Container engines and systemd disagree on quotes, so nothing is quoted.
    [[ $value != [\"\']* ]] || stop "$file, line $number: write $name without quotes, as every reader of this file takes it literally"
    if [[ -v $name && ${!name} != "$value" ]]; then
      # A proxy's address may have a password.
      if [[ $name == *TOKEN* || ${name^^} == *_PROXY ]]; then
        say "$name of the environment comes before that of $file"
      else
        say "$name=${!name} of the environment comes before $name=$value of $file"
      fi
    else
      printf -v "$name" '%s' "$value"
    fi
    if is_passed_on "$name"; then export "${name?}"; fi
  done <"$file"
}

is_known() {
  local pair
  for pair in "${DEFAULTS[@]}"; do [[ $1 == "${pair%%=*}" ]] && return 0; done
  is_passed_on "$1"
}

is_passed_on() {
  local name
  # HCCL has many, and new ones with each release.
  [[ $1 != HCCL_* ]] || return 0
  for name in "${PASSED_ON[@]}"; do [[ $1 == "$name" ]] && return 0; done
  return 1
}

check_settings() {
  local name
  one_of DEVICE hpu hpu-sim cpu
  one_of HARDWARE gaudi2 gaudi3
  one_of RECORD_SHAPES 0 1
  one_of PREFIX_CACHING 0 1
  one_of BIND_CORES 0 1
  one_of RETRIEVAL_PARALLEL auto heads context
  # Torch's compiler for CPUs supports no gathers between ranks inside a layer.
  [[ $DEVICE != cpu || $GRAPHS != compile || $RETRIEVAL_PARALLEL != auto ]] || RETRIEVAL_PARALLEL=heads
  for name in "${WHOLE[@]}"; do
    [[ ${!name} =~ ^[0-9]*$ ]] || stop "expected $name to be a whole number, got '${!name}'"
  done
  for name in "${POSITIVE[@]}"; do
    [[ ! ${!name} =~ ^0+$ ]] || stop "expected $name to be at least 1, got '${!name}'"
  done
  for name in TYPICAL_LEN LONG_NUM_SEQS MOST_NUM_SEQS MAX_NUM_BATCHED_TOKENS BLOCK_SIZE GRAPHS_BUDGET WARMUP_SECONDS \
    MIN_FREE_GIB RECIPE_CACHE_MB MIN_HUGE_PAGES PORT DRAIN_SECONDS MODEL STATE_DIR HOST TENSOR_PARALLEL_SIZE REPLICAS; do
    [[ -n ${!name} ]] || stop "expected a value of $name, got none: leave the line out for its default"
  done
  [[ $STATE_DIR == /* && $STATE_DIR != *[,[:space:]]* ]] ||
    stop "expected STATE_DIR to be an absolute path without commas and spaces, got '$STATE_DIR'"
  # Limits would be chosen as if heads streamed, and none does.
  [[ $SPARSITY =~ ^[0.]*$ || -n $PATTERN ]] ||
    stop "SPARSITY=$SPARSITY needs PATTERN, the directory that says which heads stream"
  [[ -z $ROUTER || $REPLICAS -gt 1 ]] || stop "ROUTER=$ROUTER chooses among replicas: set REPLICAS to 2 or more, or leave it out"
  NUM_CARDS=$((TENSOR_PARALLEL_SIZE * REPLICAS))
  [[ -z $PROFILE_STEPS || -n $PROFILE_DIR ]] || stop "PROFILE_STEPS=$PROFILE_STEPS needs PROFILE_DIR, a directory for the trace"
  if [[ $DEVICE == hpu ]]; then
    export PT_HPU_RECIPE_CACHE_CONFIG=${PT_HPU_RECIPE_CACHE_CONFIG:-$STATE_DIR/recipes,false,$RECIPE_CACHE_MB}
  fi
}

one_of() {
  local name=$1 value
  for value in "${@:2}"; do [[ ${!name} == "$value" ]] && return; done
  stop "expected $name to be one of ${*:2}, got '${!name}'"
}
