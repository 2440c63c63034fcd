#!/usr/bin/env bash
# What the guest runs, in a root that is an overlay over the host's files: `guest.sh CACHE RUN`. It starts the NFS server
# and the client hosts, mounts the export on each, runs the command of RUN/cmd.sh and reports its exit status.
RUN=$2
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
exec </dev/null
# VERS MOPTS BACK LEASE GRACE RTT LAYOUT HOSTS SYNC CLOCK OUTDIR CWD TRACE
. "$RUN/conf"

uptime_s() { cut -d' ' -f1 /proc/uptime; }
trace() { [ "$TRACE" != 1 ] || echo "[$(uptime_s)] $*"; }
booted=$(uptime_s)

# The engine's ways to the outside: consoles of User Mode Linux, virtio ports of QEMU.
if [ -e /dev/ubda ]; then
  disk=/dev/ubda
  port() { case $1 in out) echo /dev/tty1 ;; status) echo /dev/tty2 ;; ready) echo /dev/tty3 ;; esac; }
  mount_out() { mount -t hostfs -o "$OUTDIR" none /out; }
else
  disk=/dev/vda
  port() { local p; for p in /sys/class/virtio-ports/*; do [ "$(cat "$p/name")" != "$1" ] || echo "/dev/${p##*/}"; done; }
  mount_out() { mount -t virtiofs out /out; }
  date -s "@$CLOCK" >/dev/null 2>&1
fi

finish() {
  echo "$1" >"$(port status)"
  sync
  exit 0
}

die() {
  echo "nfslab guest: $*"
  echo "nfslab guest: $*" >"$(port out)"
  finish 125
}

hostname srv
names=(a b c d e f g h i j k l m n o p)
names=("${names[@]:0:HOSTS}")
echo '127.0.0.1 localhost' >/etc/hosts
for i in "${!names[@]}"; do
  printf '10.9.%d.1 srv srv-%s\n10.9.%d.2 cli%s\n' $((i + 1)) "${names[i]}" $((i + 1)) "${names[i]}" >>/etc/hosts
done
grep -q _rpc /etc/passwd || echo '_rpc:x:1234:65534::/run/rpcbind:/usr/sbin/nologin' >>/etc/passwd
grep -q statd /etc/passwd || echo 'statd:x:1235:65534::/var/lib/nfs:/usr/sbin/nologin' >>/etc/passwd
ip link set lo up
mkdir -p /run/ns /mnt/a /mnt/b "${names[@]/#//mnt/}" /srv/export /run/rpc_pipefs
mkdir -p /var/lib/nfs/{v4recovery,v4root,nfsdcld,sm,sm.bak,rpc_pipefs}
touch /var/lib/nfs/{etab,rmtab,state,export-lock}
mount -t nfsd nfsd /proc/fs/nfsd || die "no nfsd file system"
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
mount --bind /var/lib/nfs/rpc_pipefs /run/rpc_pipefs

fsid=
case $BACK in
  tmpfs) mount -t tmpfs -o size=512M exp /srv/export; fsid=,fsid=77 ;;
  ext4) mount -t ext4 -o noatime "$disk" /srv/export || die "cannot mount ext4" ;;
esac
chmod 1777 /srv/export

# A client host is a network and a host-name namespace; the mounts themselves land in the common mount namespace. With
# one host name for all, they would be one client to an NFSv4 server.
make_host() { # NAME ADDRESS SERVER'S-ADDRESS
  local pid
  : >"/run/ns/$1.net"
  : >"/run/ns/$1.uts"
  unshare --net="/run/ns/$1.net" --uts="/run/ns/$1.uts" hostname "cli$1" || die "unshare $1"
  ip link add "s$1" type veth peer name "c$1"
  nsenter --net="/run/ns/$1.net" sleep 1000000 &
  pid=$!
  while [ "$(readlink /proc/$pid/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
  ip link set "c$1" netns "$pid" || die "cannot give host $1 its link"
  kill "$pid"
  ip addr add "$3/24" dev "s$1"
  ip link set "s$1" up
  nsenter --net="/run/ns/$1.net" sh -c "ip link set lo up; ip addr add $2/24 dev c$1; ip link set c$1 up"
  [ "$RTT" = 0 ] || tc qdisc add dev "s$1" root netem delay "${RTT}ms" || die "netem"
}
trace "hosts"
for i in "${!names[@]}"; do make_host "${names[i]}" "10.9.$((i + 1)).2" "10.9.$((i + 1)).1"; done

cat >/usr/local/bin/on_host <<'X'
#!/usr/bin/env bash
# on_host a|b|... COMMAND...: run it with that client's network and host name
n=$1
shift
exec nsenter --net="/run/ns/$n.net" --uts="/run/ns/$n.uts" "$@"
X
cat >/usr/local/bin/link_host <<'X'
#!/usr/bin/env bash
# link_host a|b|... up|down: heal or cut that client's network
ip link set "s$1" "$2"
X

# rpcbind and statd, which NFSv3 and its lock manager need, per host: each with a private /run and /var/lib/nfs, so that
# no "hosts" share a local socket of rpcbind.
rpc_daemons() { # a|b|...|srv
  local inside=()
  [ "$1" = srv ] || inside=(nsenter --net="/run/ns/$1.net" --uts="/run/ns/$1.uts")
  "${inside[@]}" unshare -m bash -c '
    mount --make-rprivate /
    mount -t tmpfs r /run && mkdir -p /run/rpcbind /run/lock && chown _rpc /run/rpcbind
    mount -t tmpfs s /var/lib/nfs && mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak && : >/var/lib/nfs/state
    rpcbind -i -w || exit 1
    exec rpc.statd --no-notify -p 4046 -o 4047' || die "rpc daemons of $1"
}
v3=0
case $VERS in 3*) v3=1 ;; esac
if [ $v3 = 1 ]; then
  trace "rpc daemons"
  for name in srv "${names[@]}"; do rpc_daemons "$name"; done
fi

export_path=/srv/export
case $VERS in 4*) fsid=,fsid=0 export_path=/ ;; esac # the overlay root can't be the root that NFSv4 shows
echo "/srv/export *(rw,$SYNC,no_subtree_check,no_root_squash,insecure$fsid)" >/etc/exports
printf '[nfsd]\nudp=n\n' >/etc/nfs.conf
cat >/usr/local/bin/nfs_server <<'X'
#!/usr/bin/env bash
# nfs_server start|stop|restart|endgrace|notify; stop drops all state; notify tells NFSv3 clients of a reboot
start() {
  exportfs -ra
  echo %LEASE% >/proc/fs/nfsd/nfsv4leasetime
  echo %GRACE% >/proc/fs/nfsd/nfsv4gracetime
  [ %GRACE% = 0 ] || echo %GRACE% >/proc/sys/fs/nfs/nlm_grace_period 2>/dev/null
  pidof nfsdcld >/dev/null || nfsdcld || echo "nfsdcld failed"
  pidof rpc.mountd >/dev/null || rpc.mountd --port 4050
  if [ %V3% = 1 ]; then rpc.nfsd 8; else rpc.nfsd -N 3 8; fi
}
notify() {
  local p
  for p in $(pidof rpc.statd); do
    [ "$(readlink "/proc/$p/ns/net")" != "$(readlink /proc/self/ns/net)" ] || exec nsenter -t "$p" -m -r sm-notify -f -v srv
  done
  echo "the server has no statd"
  exit 1
}
case $1 in
  start) start ;;
  stop) rpc.nfsd 0 ;;
  restart) rpc.nfsd 0; start ;;
  notify) notify ;;
  endgrace) echo Y >/proc/fs/nfsd/v4_end_grace; echo Y >/proc/fs/lockd/nlm_end_grace ;;
  *) sed -n 2p "$0"; exit 64 ;;
esac
X
sed -i "s/%LEASE%/$LEASE/g; s/%GRACE%/$GRACE/g; s/%V3%/$v3/g" /usr/local/bin/nfs_server
chmod +x /usr/local/bin/{on_host,link_host,nfs_server}
trace "server"
nfs_server start || die "the server does not start"
nfs_server endgrace 2>/dev/null

mount_on() { # HOST SERVER POINT OPTIONS
  timeout 100 on_host "$1" mount -t nfs -o "vers=$VERS$4" "$2:$export_path" "$3" || die "cannot mount $3"
}
trace "mounts"
more=${MOPTS:+,$MOPTS}
case $LAYOUT in
  hosts)
    for i in "${!names[@]}"; do mount_on "${names[i]}" "10.9.$((i + 1)).1" "/mnt/${names[i]}" "$more"; done
    ;;
  nosharecache) # one client host, two superblocks
    mount_on a 10.9.1.1 /mnt/a "$more,nosharecache"
    mount_on a 10.9.1.1 /mnt/b "$more,nosharecache"
    ;;
esac
if [ -n "$OUTDIR" ]; then
  mkdir -p /out
  mount_out || die "cannot mount /out"
fi

export NFS_A=/mnt/a NFS_B=/mnt/b NFS_SERVER_DIR=/srv/export NFS_VERS=$VERS NFS_MOPTS=$MOPTS NFS_LAYOUT=$LAYOUT NFS_OUT=/out NFS_HOSTS="${names[*]}"
echo "guest: up after $booted s, mounted after $(uptime_s) s"
(while echo; do sleep 5; done) >"$(port ready)" & # the pulse, by which nfslab.py sees that the guest is not frozen
pulse=$!
grep ' nfs' /proc/mounts
cd "$CWD" 2>/dev/null || cd /
(
  bash "$RUN/cmd.sh"
  echo $? >/run/ctl/rc
) 2>&1 </dev/null | cat >"$(port out)"
rc=$(cat /run/ctl/rc 2>/dev/null || echo 126)
kill "$pulse"
dmesg | grep -iE 'nfs|lockd|rpc' | tail -40
if [ -n "$OUTDIR" ]; then
  sync
  umount /out
fi
finish "$rc"
