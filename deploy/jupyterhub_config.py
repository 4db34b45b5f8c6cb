"""JupyterHub for a room: users of this machine, one shared environment, notebooks of their own. docs/hub.md says how.

Run it with the Python that the kit is installed for: ``.venv/bin/jupyterhub -f deploy/jupyterhub_config.py``.
"""

import os
import pwd
import subprocess
import sys
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
SEATS = int(os.environ.get("KVVIZ_SEATS", "30"))
"""How many servers may run at once; the CPU's cores are shared out among them."""

GROUP = os.environ.get("KVVIZ_GROUP", "kvviz")
"""Members of this group of the system may log in."""

IDLE_S = 3600
"""A kernel that nobody has used for so long ends, and gives its memory on the GPU back."""

NOTEBOOKS = Path(os.environ.get("KVVIZ_NOTEBOOKS", KIT / "workshop" / "participants"))
if not NOTEBOOKS.is_dir():
    sys.exit(f"{NOTEBOOKS} is not there: run python -m kvviz workshop in {KIT}, or set KVVIZ_NOTEBOOKS")

FOLDER = "kvviz-notebooks"
COPY = """
import shutil, sys
from pathlib import Path
source, target = map(Path, sys.argv[1:])
target.mkdir(exist_ok=True)
for path in source.iterdir():
    if path.suffix in (".ipynb", ".json") and not (target / path.name).exists():
        shutil.copyfile(path, target / path.name)
"""
"""What is there already stays as its owner left it."""


def copy_notebooks(spawner) -> None:
    """Copy the notebooks into the user's home, as the user: what a home links to is touched with no rights but theirs.

    Raises:
        subprocess.CalledProcessError: the home cannot be written to; the server does not start.
    """
    user = pwd.getpwnam(spawner.user.name)
    command = [sys.executable, "-c", COPY, str(NOTEBOOKS), f"{user.pw_dir}/{FOLDER}"]
    subprocess.run(command, user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd="/", check=True, timeout=60)


threads = str(max(1, (os.cpu_count() or 1) // SEATS))

c = get_config()  # noqa: F821 - JupyterHub defines it
c.JupyterHub.bind_url = os.environ.get("KVVIZ_HUB_URL", "http://127.0.0.1:8000")
c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.allowed_groups = {GROUP}
c.JupyterHub.active_server_limit = SEATS
c.JupyterHub.concurrent_spawn_limit = 10
c.Spawner.cmd = [str(Path(sys.executable).with_name("jupyterhub-singleuser"))]
c.Spawner.args = [
    f"--MappingKernelManager.cull_idle_timeout={IDLE_S}",
    "--MappingKernelManager.cull_connected=True",
    f"--ServerApp.shutdown_no_activity_timeout={2 * IDLE_S}",
]
c.Spawner.notebook_dir = f"~/{FOLDER}"
c.Spawner.default_url = "/lab/tree/00_check_your_machine.ipynb"
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120
c.Spawner.pre_spawn_hook = copy_notebooks
c.Spawner.environment = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
for name in ("KVVIZ_CACHE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
    if name in os.environ:
        c.Spawner.environment[name] = os.environ[name]
