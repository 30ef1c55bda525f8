# Sourced by run, test and demo: sets up what is missing; afterwards $environment is the Python environment to use.
# GEARSHIFT_VLLM=0.26 chooses the version that Gaudi users have.

local_folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
checkout=$(cd -- "$local_folder/../.." && pwd -P)

find_python() {
    local candidate candidates=(python3.11 python3.12 python3.13 python3) wrong="was not found in PATH"
    if [[ -n ${GEARSHIFT_PYTHON:-} ]]; then
        candidates=("$GEARSHIFT_PYTHON")
        wrong="is not what GEARSHIFT_PYTHON names: $GEARSHIFT_PYTHON"
    fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v -- "$candidate"
            return
        fi
    done
    echo "Python 3.11, 3.12 or 3.13 is needed and $wrong (GEARSHIFT_PYTHON=/path/to/python names one)." >&2
    return 1
}

python=$(find_python) || exit 2
# Bytecode of set-up itself stays out of the checkout; -I keeps the caller's Python variables out.
environment=$("$python" -I -B "$local_folder/setup.py" "${GEARSHIFT_VLLM:-0.32}") || exit $?
unset PYTHONPATH PYTHONHOME
export PATH="$environment/bin:$PATH" VIRTUAL_ENV="$environment"
# What Python compiles is kept, and out of the checkout: each of an engine's three processes imports thousands of modules.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="${GEARSHIFT_HOME:-$checkout/.gearshift}/cache/bytecode"
