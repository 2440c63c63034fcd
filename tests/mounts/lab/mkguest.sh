#!/usr/bin/env bash
# Run in the cache folder: builds QEMU's guest.cpio (busybox, kernel modules, and Debian's NFS packages, extracted and
# not installed) and what User Mode Linux needs (uml/, ird/deb).
set -euo pipefail
kernel=$(ls /lib/modules | grep cloud-amd64 | sort -V | tail -1)
needed="nfs-common nfs-kernel-server rpcbind libnfsidmap1 libwrap0 keyutils libevent-core-2.1-7 ucf"
mkdir -p debs
# Download a package, and update the lists of packages only if they are too old for that (`apt` is of nfslab).
download() { apt-get download -q "$1" || { apt update && apt download "$1"; }; }
for package in $needed; do
  ls debs/"${package}"_*.deb >/dev/null 2>&1 || (cd debs && download "$package")
done

rm -rf ird
mkdir -p ird/{bin,proc,sys,dev,lower,rw,newroot,deb/usr/{bin,sbin,lib},mods,ctl}
ln -s usr/sbin ird/deb/sbin
ln -s usr/lib ird/deb/lib
ln -s usr/bin ird/deb/bin
for package in $needed; do
  # Through tar: `dpkg -x` would replace the links above by directories.
  dpkg-deb --fsys-tarfile debs/"${package}"_*.deb | tar -x -C ird/deb --keep-directory-symlink --no-same-owner
done
rm -rf ird/deb/usr/share/{doc,man,locale,bug,lintian}

cp /bin/busybox ird/bin/busybox
for applet in sh mount umount insmod cat ls mkdir chroot echo sleep grep poweroff reboot ln cut cp tr sed; do
  ln -sf busybox "ird/bin/$applet"
done
# modules_of [modprobe options] -- MODULE...: their files, each once, those needed by others first
modules_of() {
  local options=() module
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  for module in "$@"; do modprobe "${options[@]}" --show-depends "$module"; done |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }'
}
: >ird/mods/order
modules_of -S "$kernel" -- virtio_pci virtio_console virtio_blk virtiofs overlay veth sch_netem loop nfsd nfs nfsv3 nfsv4 |
  while read -r file; do
    cp "$file" ird/mods/
    basename "$file" >>ird/mods/order
  done
cp init.guest ird/init
chmod +x ird/init
(cd ird && find . | cpio -o -H newc --quiet --owner 0:0) >guest.cpio
echo "$kernel" >guest.kver

mkdir -p uml/moddir/lib/modules m
gcc -O2 -shared -fPIC -o uml/shim.so shim.c
kernel=$(ls /usr/lib/uml/modules | sort -V | tail -1)
ln -sfn "/usr/lib/uml/modules/$kernel" "uml/moddir/lib/modules/$kernel"
modules_of -d "$PWD/uml/moddir" -S "$kernel" -- overlay veth sch_netem nfsd nfs nfsv3 nfsv4 >uml/order
