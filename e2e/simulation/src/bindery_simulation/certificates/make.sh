#!/bin/sh
# Makes the certificates anew: an authority, a bookie, two clients that it knows, and one that another authority signed.
set -eu
cd "$(dirname "$0")"
DAYS=36500
new_authority() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $DAYS \
        -subj "/O=Bindery tests/CN=$2" -keyout "$1.key" -out "$1.pem" -addext "keyUsage=critical,keyCertSign,cRLSign"
}
new_certificate() { # file, authority, name, alternative names
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/O=Bindery tests/CN=$3" \
        -keyout "$1.key" -out "$1.csr"
    printf 'subjectAltName=%s\nkeyUsage=critical,digitalSignature\n' "$4" >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days $DAYS -extfile "$1.ext" \
        -out "$1.pem"
    rm "$1.csr" "$1.ext"
}
new_authority ca "test authority"
new_authority other-ca "another test authority"
new_certificate bookie ca bookie "DNS:localhost,IP:127.0.0.1"
new_certificate client ca broker "DNS:broker.test"
new_certificate guest ca guest "DNS:guest.test"
new_certificate stranger other-ca broker "DNS:broker.test"
rm -f ./*.srl ca.key other-ca.key
