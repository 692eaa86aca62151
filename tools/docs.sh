#!/usr/bin/env bash
# Builds the documentation site into build/site, or says why not: a link or anchor that leads nowhere, a page that is in no menu.
# bash tools/docs.sh [serve]: with serve, shows it on localhost and builds again on each change. DOCS_VENV: where mkdocs is, or is
# installed to by pip (default build/docs-venv). PYTHON: what makes that environment.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(mkdocs==1.6.1 mkdocs-material==9.8.2)
venv=${DOCS_VENV:-build/docs-venv}
if [[ $(cat "$venv/packages" 2>/dev/null) != "${packages[*]}" ]]; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "${packages[@]}"
  echo "${packages[*]}" >"$venv/packages"
fi
export NO_MKDOCS_2_WARNING=1  # about the end of mkdocs 1
exec "$venv/bin/python" -m mkdocs "${1:-build}" --strict
