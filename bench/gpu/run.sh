#!/bin/sh
# Everything about CUDA on a machine with a GPU: `cargo xtask gpu` puts it beside the program and its images. Ends with the number of failures.
cd "$(dirname "$0")" || exit 2
export CROSSMESH_CUBINS="$PWD/cubins" TMPDIR="${TMPDIR:-/tmp}"
failed=0
say() { printf '\n== %s (%s)\n' "$*" "$(date +%T)"; }
fail() { printf 'FAILED: %s\n' "$*"; failed=$((failed + 1)); }

say "the machine"
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
used_before=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)

say "every kernel against f64, and its time"
./crossmesh bench kernels --checks 6 --choices choices.json || fail "kernels"

say "the same through NVRTC, without images"
CROSSMESH_CUBINS=/nonexistent XDG_CACHE_HOME="$PWD/cache" ./crossmesh bench kernels --checks 1 --no-times > nvrtc.txt 2>&1 || fail "NVRTC"
tail -n 1 nvrtc.txt
ls cache/crossmesh/cuda | head -n 3

say "what is missing is named"
CUDA_VISIBLE_DEVICES= ./crossmesh bench kernels --checks 1 2>&1 | head -n 3
./crossmesh run 'f32[64,64]@A{tp:2}(tp,_)' 'f32[64,64]@B{tp:2}(_,tp)' --memory cuda 2>&1 | tail -n 2
timeout 60 ./crossmesh run 'f32[1048576,65536]@A{tp:2}(tp,_)' 'f32[1048576,65536]@B{tp:2}(_,tp)' --memory cuda --share-gpus 2>&1 | tail -n 2
mkdir -p broken && for image in cubins/*sm_90a*; do printf 'no image' > "broken/${image##*/}"; done
CROSSMESH_CUBINS="$PWD/broken" ./crossmesh bench kernels --checks 1 2>&1 | head -n 3

# `one`: all ranks on one host, so that memory is mapped; `many`: hosts of their own, so that it is staged over TCP.
printf '[[host]]\ndevices = 16\n' > one.toml
printf '[[host]]\ncount = 16\ndevices = 1\n' > many.toml
say "reshards, every element looked at"
count=0
reshard() {
    label=$1
    shift
    count=$((count + 1))
    out=$(timeout 60 ./crossmesh run "$@" --share-gpus 2>&1) || fail "$label: $* : $(echo "$out" | tail -n 2)"
}
for memory in cuda cuda:0,2 cuda:1,3-9; do
    for where in one many; do
        while IFS='|' read -r src dst; do
            reshard "$where $memory" "$src" "$dst" --memory "$memory" --cluster $where.toml
        done <<EOF
f32[511,333]@A{tp:2}(tp,_)|f32[511,333]@B{tp:3}(_,tp)
bf16[97,128,5]@A{dp:2}(_,dp,_)|bf16[97,128,5]@B{tp:2}(tp,_,_)
u8[1000003]@A{tp:2}(tp)|u8[1000003]@B{tp:2}(_)
f64[64,48,3,7]@A{x:2,y:1}(x,_,_,_)|f64[64,48,3,7]@B{y:2}(_,_,_,y)
EOF
    done
done
for dtype in f64 f32 bf16 f16 f8e4m3 f8e5m2 i64 i32 i8 u8; do
    for op in sum max min; do
        [ $op = sum ] || [ $dtype = f32 ] || [ $dtype = bf16 ] || continue
        layout=$(printf '%s[123,77]@A{dp:2}(_,_ | %s dp)' "$dtype" "$op")
        reshard "$op" "$layout" "$dtype[123,77]@B{tp:2}(_,tp)" --memory cuda --cluster one.toml
    done
done
echo "$count reshards"

say "how fast: 128 MiB from two ranks to two"
for where in one many; do
    for memory in host cuda cuda:0,1 cuda:2,3; do
        printf '%-10s %s: ' "$memory" "$where"
        ./crossmesh run 'f32[8192,4096]@A{tp:2}(tp,_)' 'f32[8192,4096]@B{tp:2}(_,tp)' --memory $memory --share-gpus \
            --cluster $where.toml --repeat 5 2>&1 | grep -E "median|error" | head -n 1
    done
done

say "how fast torch is"
timeout 120 python3 beside.py || echo "torch was not measured"

say "a rank that is killed leaves no memory behind"
./crossmesh run 'f32[8192,4096]@A{tp:2}(tp,_)' 'f32[8192,4096]@B{tp:2}(_,tp)' --memory cuda --share-gpus --repeat 2000 > killed.txt 2>&1 &
job=$!
sleep 8
used_meanwhile=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
# The first rank among its children (one is a shell that cleans up); without tools that a machine may lack.
victim=$(cat /proc/[0-9]*/stat 2> /dev/null | sed 's/(.*)/-/' | while read -r id _ _ parent _; do
    [ "$parent" = "$job" ] && tr '\0' ' ' < "/proc/$id/cmdline" | grep -q "crossmesh rank " && echo "$id" && break
done)
if [ -n "$victim" ] && kill -9 "$victim"; then
    wait $job && fail "a run ended well although a rank was killed"
    grep -E "error" killed.txt | tail -n 1
else
    fail "no rank was there to be killed"
    kill -9 $job
fi
sleep 2
used_after=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
echo "memory in use before $used_before MiB, meanwhile $used_meanwhile MiB, after $used_after MiB"
[ "$used_after" -le $((used_before + 64)) ] || fail "memory was left behind"

# Two rounds: rows that are whole vectors, and rows that are not. Kernels that are complained about are named.
for tool in memcheck initcheck racecheck; do
    say "compute-sanitizer $tool"
    timeout 240 compute-sanitizer --tool $tool --error-exitcode 9 ./crossmesh bench kernels --checks 2 --no-times > sanitizer.txt 2>&1 || fail "$tool"
    grep -E "ERROR SUMMARY|RACECHECK SUMMARY|checks right|Error|error:" sanitizer.txt | sort | uniq -c | head -n 8
    sed -n 's/^=========  *at \([^+]*\)+0x.*/\1/p' sanitizer.txt | sort | uniq -c | sort -rn | head -n 8
done

say "$failed failed"
exit $failed
