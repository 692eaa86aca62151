#!/usr/bin/env bash
# All checks of style and structure. PYTHON: a Python with ruff, mypy and import-linter. Runs them all, fails if one fails.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
failed=()

check() { # name, command...
  local name=$1
  shift
  if "$@"; then echo "lint: $name ok"; else failed+=("$name"); echo "lint: $name FAILED"; fi
}

clang_format() {
  command -v clang-format >/dev/null || { echo "clang-format is not on PATH (apt-get install clang-format)"; return 1; }
  find csrc tests benchmarks tools \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 | xargs -0 -r clang-format --dry-run -Werror
}

check "ruff check" "$PYTHON" -m ruff check .
check "ruff format" "$PYTHON" -m ruff format --check .
check "mypy --strict shardcore" "$PYTHON" -m mypy --strict shardcore
check "import order" "$PYTHON" -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True))'
check "rooms" "$PYTHON" -m tools.check_includes
check "planted faults" "$PYTHON" -m tools.faults --check
check "words of pages and messages" "$PYTHON" -m tools.prose --check
check "clang-format" clang_format

if ((${#failed[@]})); then
  echo "lint: failed: ${failed[*]}"
  exit 1
fi
echo "lint: all ok"
