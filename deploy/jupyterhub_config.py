"""Configures JupyterHub for a class on one machine. docs/hub.md explains how to use this file.

The participants are users of this machine. They share one Python environment, and each has a copy of the notebooks.
Start the Hub with the Python environment of kvviz: ``.venv/bin/jupyterhub -f deploy/jupyterhub_config.py``.
"""

import os
import pwd
import subprocess
import sys
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
SEATS = int(os.environ.get("KVVIZ_SEATS", "30"))
"""Number of servers that may run at the same time, one per participant. Each server may use an equal share of the CPU
cores."""

GROUP = os.environ.get("KVVIZ_GROUP", "kvviz")
"""Name of a group of the operating system. Only members of this group may log in."""

IDLE_S = 3600
"""Idle time in seconds after which a Jupyter kernel is ended, so that its GPU memory is free again."""

NOTEBOOKS = Path(os.environ.get("KVVIZ_NOTEBOOKS", KIT / "workshop" / "participants"))
if not NOTEBOOKS.is_dir():
    sys.exit(
        f"the folder {NOTEBOOKS} does not exist: run python -m kvviz workshop in {KIT}, "
        f"or set KVVIZ_NOTEBOOKS to the folder of the notebooks"
    )

FOLDER = "kvviz-notebooks"
COPY = """
import os, shutil, sys
from pathlib import Path
source, target = map(Path, sys.argv[1:])
target.mkdir(exist_ok=True)
for path in source.iterdir():
    if path.suffix in (".ipynb", ".json") and not os.path.lexists(target / path.name):
        part = target / f".{path.name}.part"
        shutil.copyfile(path, part)
        os.replace(part, target / path.name)
"""
"""Program that copies the notebooks and their data files into a user's folder. It never changes an existing file."""


def copy_notebooks(spawner) -> None:
    """Copy the notebooks into the user's home folder.

    The program runs as the user, and not as root. So a link in the home folder cannot lead it to a file that the user
    may not change.

    Raises:
        subprocess.CalledProcessError: the home folder cannot be written to. The user's server then does not start.
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
