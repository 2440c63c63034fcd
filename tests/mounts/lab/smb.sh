#!/usr/bin/env bash
# Runs in the guest of nfslab (User Mode Linux): `smb.sh OPTIONS COMMAND...`. Samba shares the exported directory, and
# both client hosts mount it with the kernel's SMB client at /mnt/a and /mnt/b, in place of NFS. OPTIONS are more mount
# options, such as `cache=none` ('' for none). It needs Debian's samba and cifs-utils.
set -euo pipefail
options=${1:+,$1}
shift
[ -e "/lib/modules/$(uname -r)" ] || ln -s "/usr/lib/uml/modules/$(uname -r)" /lib/modules/
for module in cryptomgr hmac cmac sha512_generic md5 ecb ccm gcm ctr ghash-generic seqiv cifs; do
  modprobe "$module"
done
umount /mnt/a /mnt/b
mkdir -p /run/samba /var/lib/samba/private /var/cache/samba /var/log/samba
cat >/etc/samba/smb.conf <<C
[global]
  workgroup = LAB
  server role = standalone server
  map to guest = never
  log file = /var/log/samba/%m.log
  disable netbios = yes
  smb ports = 445
  load printers = no
${SMB_GLOBAL:-}
[share]
  path = /srv/export
  read only = no
  force user = root
${SMB_SHARE:-}
C
printf 'lab\nlab\n' | smbpasswd -s -a root
smbd -D
for _ in $(seq 100); do smbcontrol smbd ping >/dev/null 2>&1 && break; sleep 0.1; done
number=0
for host in a b; do
  number=$((number + 1))
  on_host $host mount -t cifs "//10.9.$number.1/share" "/mnt/$host" -o "username=root,password=lab$options" ||
    { dmesg | tail -20; exit 125; }
done
grep ' cifs ' /proc/mounts
"$@"
