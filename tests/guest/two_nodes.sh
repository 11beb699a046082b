#!/bin/sh
# Runs a command in a virtual machine with two NUMA nodes of two cores with SMT each, whose files are this
# machine's (what it writes is lost). For what a kernel has to show, such as where memory lies: a manual check.
#
#   tests/guest/two_nodes.sh KERNEL COMMAND…
#
# KERNEL is an unpacked kernel package, e.g. of Debian:
#   apt-get download linux-image-6.1.0-57-amd64 && dpkg -x linux-image-*.deb kernel
# Needs qemu-system-x86 and busybox-static. It emulates the CPUs, some ten times slower than these are; with
# ACCEL=kvm CPU=host it does not, where that is possible.
set -eu
kernel=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/initramfs/bin" "$work/initramfs/modules"
cp "$(command -v busybox)" "$work/initramfs/bin/busybox"
# In the order in which they need each other.
modules="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci netfs fscache 9pnet 9pnet_virtio 9p overlay"
for module in $modules; do
    find "$kernel" -name "$module.ko" -exec cp {} "$work/initramfs/modules/" \;
done
for word in "$@"; do
    printf "'%s' " "$(printf %s "$word" | sed "s/'/'\\\\''/g")"
done > "$work/initramfs/command"
pwd > "$work/initramfs/folder"
env | grep -E '^(PATH|PYTHON[A-Z]*|GRISTMILL_[A-Z_]*)=' | sed "s/'/'\\\\''/g; s/=/='/; s/\$/'/; s/^/export /" \
    > "$work/initramfs/environment"
cat > "$work/initramfs/init" <<EOF
#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mkdir -p /proc /lower /upper /root
mount -t proc proc /proc
for module in $modules; do insmod /modules/\$module.ko; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 files /lower
mount -t tmpfs tmpfs /upper
mount -t tmpfs tmpfs /root
for entry in /lower/*; do
    name=\${entry##*/}
    case \$name in proc | sys | dev | run) mkdir /root/\$name; continue ;; esac
    if [ -L \$entry ] || [ ! -d \$entry ]; then cp -a \$entry /root/; continue; fi
    mkdir -p /root/\$name /upper/\$name/changed /upper/\$name/work
    mount -t overlay -o lowerdir=\$entry,upperdir=/upper/\$name/changed,workdir=/upper/\$name/work overlay /root/\$name
done
mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm
mount -t tmpfs shm /root/dev/shm
mount -t cgroup2 cgroup /root/sys/fs/cgroup
ip link set lo up 2>/dev/null
{ cat /environment; echo "cd \$(cat /folder)"; cat /command; } > /root/run-here
chroot /root /bin/sh /run-here
echo "exit code \$?"
poweroff -f
EOF
chmod +x "$work/initramfs/init"
(cd "$work/initramfs" && find . | busybox cpio -o -H newc 2>/dev/null | gzip > "$work/initramfs.gz")

qemu-system-x86_64 -accel "${ACCEL:-tcg,thread=single}" -cpu "${CPU:-max,vendor=GenuineIntel}" -nographic -no-reboot \
    -smp 8,sockets=2,cores=2,threads=2 -m 4G \
    -object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G \
    -numa node,nodeid=0,cpus=0-3,memdev=m0 -numa node,nodeid=1,cpus=4-7,memdev=m1 \
    -kernel "$(ls "$kernel"/boot/vmlinuz-*)" -initrd "$work/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1" \
    -fsdev local,id=files,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=files,mount_tag=files
