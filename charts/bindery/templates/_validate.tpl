{{/*
Combinations of values that cannot work. Each message names the values and the fix; all are reported at once.
*/}}

{{- define "bindery.validate" -}}
{{- $problems := concat
  (include "bindery.problems.names" . | fromYamlArray)
  (include "bindery.problems.workloads" . | fromYamlArray)
  (include "bindery.problems.accounts" . | fromYamlArray)
  (include "bindery.problems.quorums" . | fromYamlArray)
  (include "bindery.problems.zookeeper" . | fromYamlArray)
  (include "bindery.problems.memory" . | fromYamlArray)
  (include "bindery.problems.stopping" . | fromYamlArray)
  (include "bindery.problems.broker" . | fromYamlArray)
  (include "bindery.problems.access" . | fromYamlArray)
  (include "bindery.problems.security" . | fromYamlArray)
  (include "bindery.problems.audit" . | fromYamlArray)
  (include "bindery.problems.backup" . | fromYamlArray)
  (include "bindery.problems.extra" . | fromYamlArray)
  (include "bindery.problems.installed" . | fromYamlArray)
-}}
{{- if $problems -}}
{{- fail (printf "\n\nThese values cannot work:\n- %s\n" (join "\n- " $problems)) -}}
{{- end -}}
{{- end }}

{{- define "bindery.problems.names" -}}
{{- $problems := list -}}
{{- $name := include "bindery.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" $name) -}}
{{- $problems = append $problems (printf "the objects' names would begin with %q; that must be 1 to 40 lower-case letters, digits and '-', first a letter: choose a shorter release name or set fullnameOverride" $name) -}}
{{- else if and .Values.audit.enabled .Values.audit.persistence.enabled (gt (len $name) 38) -}}
{{- /* The maximum length of a CronJob's name is 52. The longest name is <fullname>-audit-reports, which exists only with the volume. */ -}}
{{- $problems = append $problems (printf "the objects' names would begin with %q; with audit.enabled that must be 38 characters at most, because Kubernetes appends to the names of CronJobs: choose a shorter release name or set fullnameOverride, before the first install; an installed release keeps its name, and takes audit.persistence.enabled false, or audit.enabled false" $name) -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* Values with which Kubernetes would refuse a pod after a part of the release was already installed. */}}
{{- define "bindery.problems.workloads" -}}
{{- $problems := list -}}
{{- $blocks := dict "bookie" "bookie" "broker" "broker" "auditor" "auditor" "zookeeper" "zookeeper" "toolbox" "toolbox" "audit" "audit" "backup" "backup" "init" "init" "gate" "upgradeGate" "test" "helmTest" "secrets" "secretsJob" -}}
{{- range $component, $block := $blocks -}}
{{- $w := include "bindery.workload" (dict "root" $ "component" $component) | fromYaml -}}
{{- if not (or $w.image.repository (has $component (list "backup" "init" "gate" "test" "secrets"))) -}}
{{- $problems = append $problems (printf "%s.image.repository is empty: set it to %s, or to where your copy of it is" $block (has $component (list "bookie" "broker" "auditor") | ternary (printf "bindery/%s" $component) (get (dict "zookeeper" "zookeeper" "audit" "bindery/spark") $component | default "bindery/toolbox"))) -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" (default dict $w.resources) -}}
{{- $request := dig "requests" "memory" "" (default dict $w.resources) -}}
{{- if and $limit $request -}}
{{- if gt (include "bindery.bytes" $request | int64) (include "bindery.bytes" $limit | int64) -}}
{{- $problems = append $problems (printf "%s.resources.requests.memory (%v) is above %s.resources.limits.memory (%v): Kubernetes refuses such a pod; raise the limit or lower the request" $block $request $block $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* Service accounts that two workloads would create, or that are deleted with the gate's hook although other workloads
use them. */}}
{{- define "bindery.problems.accounts" -}}
{{- $problems := list -}}
{{- $components := include "bindery.accountComponents" . | fromYamlArray -}}
{{- if .Values.upgradeGate.enabled -}}{{- $components = append $components "gate" -}}{{- end -}}
{{- $users := dict -}}
{{- $makers := dict -}}
{{- range $component := $components -}}
{{- $context := dict "root" $ "component" $component -}}
{{- $name := include "bindery.serviceAccountName" $context -}}
{{- $block := printf "%s.serviceAccount" (get (dict "gate" "upgradeGate" "test" "helmTest" "audit-executor" "audit.executors" "secrets" "secretsJob") $component | default $component) -}}
{{- $_ := set $users $name (append (get $users $name | default list) $block) -}}
{{- if (include "bindery.workload" $context | fromYaml).serviceAccount.create -}}
{{- $_ := set $makers $name (append (get $makers $name | default list) $block) -}}
{{- end -}}
{{- end -}}
{{- range $name, $blocks := $makers -}}
{{- if gt (len $blocks) 1 -}}
{{- $problems = append $problems (printf "%s would each create an account called %q: leave their names empty (defaults.serviceAccount.name, too) for one each, or set create to false in all of them to use an existing account" (join ", " $blocks) $name) -}}
{{- else if and (has "upgradeGate.serviceAccount" $blocks) (gt (len (get $users $name)) 1) -}}
{{- $problems = append $problems (printf "the account %q is created by upgradeGate.serviceAccount and deleted with its job, and %s use it: give upgradeGate.serviceAccount.name another name, or set upgradeGate.serviceAccount.create to false" $name (without (get $users $name) "upgradeGate.serviceAccount" | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{- define "bindery.problems.quorums" -}}
{{- $problems := list -}}
{{- $bookies := int .Values.bookie.replicas -}}
{{- $ensemble := int .Values.broker.config.ledger.ensembleSize -}}
{{- $write := int .Values.broker.config.ledger.writeQuorum -}}
{{- $ack := int .Values.broker.config.ledger.ackQuorum -}}
{{- if lt $bookies $ensemble -}}
{{- $problems = append $problems (printf "bookie.replicas (%d) is less than broker.config.ledger.ensembleSize (%d): no ledger could be created; set bookie.replicas to %d or more (one more lets a lost bookie be healed), or a smaller ensemble" $bookies $ensemble $ensemble) -}}
{{- end -}}
{{- if lt $ensemble $write -}}
{{- $problems = append $problems (printf "broker.config.ledger.ensembleSize (%d) is less than writeQuorum (%d): each copy needs a bookie of its own; set ensembleSize to %d or more" $ensemble $write $write) -}}
{{- end -}}
{{- if lt $write $ack -}}
{{- $problems = append $problems (printf "broker.config.ledger.writeQuorum (%d) is less than ackQuorum (%d): more answers are awaited than copies are written; set ackQuorum to %d or less" $write $ack $write) -}}
{{- end -}}
{{- if lt $ack 1 -}}
{{- $problems = append $problems (printf "broker.config.ledger.ackQuorum (%d) is less than 1: set it to 2 (or 1, and lose acknowledged messages with a disk)" $ack) -}}
{{- end -}}
{{- $budget := .Values.bookie.pdb -}}
{{- if and $budget.enabled (gt (int $budget.maxUnavailable) (max 1 (sub $ack 1) | int)) -}}
{{- $problems = append $problems (printf "bookie.pdb.maxUnavailable (%d) is more than ackQuorum - 1 (%d): a node drain could make acknowledged entries unreadable; set it to %d" (int $budget.maxUnavailable) (sub $ack 1) (max 1 (sub $ack 1))) -}}
{{- end -}}
{{- if hasKey .Values.bookie "autoscaling" -}}
{{- $problems = append $problems "bookie.autoscaling is not supported: bookies hold entries, and taking one away means draining it first; remove the block, set bookie.replicas, and see `bindery bookie drain --help` for less" -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{- define "bindery.problems.zookeeper" -}}
{{- $problems := list -}}
{{- $servers := .Values.zookeeper.external.servers -}}
{{- if .Values.zookeeper.enabled -}}
{{- $replicas := int .Values.zookeeper.replicas -}}
{{- if eq (mod $replicas 2) 0 -}}
{{- $problems = append $problems (printf "zookeeper.replicas (%d) is even: a ZooKeeper ensemble of %d servers tolerates no more failures than one of %d; set it to %d or %d" $replicas $replicas (sub $replicas 1) (sub $replicas 1) (add $replicas 1)) -}}
{{- end -}}
{{- $spare := max 1 (div (sub $replicas 1) 2) | int -}}
{{- with .Values.zookeeper.pdb.maxUnavailable -}}
{{- if gt (int .) $spare -}}
{{- $problems = append $problems (printf "zookeeper.pdb.maxUnavailable (%d) would leave no majority of zookeeper.replicas (%d): set it to %d, or leave it empty" (int .) $replicas $spare) -}}
{{- end -}}
{{- end -}}
{{- if $servers -}}
{{- $problems = append $problems "zookeeper.external.servers is set while zookeeper.enabled is true: set zookeeper.enabled to false to use these servers, or remove the list" -}}
{{- end -}}
{{- else if not $servers -}}
{{- $problems = append $problems "zookeeper.enabled is false and zookeeper.external.servers is empty: name your ZooKeeper servers, as in zookeeper.external.servers={zk-0.example:2181,zk-1.example:2181}" -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* Memory limit of a workload in bytes; empty if there is none. */}}
{{- define "bindery.memoryLimit" -}}
{{- with (index . "resources" | default dict).limits -}}{{- with .memory -}}{{- include "bindery.bytes" . }}{{- end -}}{{- end -}}
{{- end }}

{{- define "bindery.problems.memory" -}}
{{- $problems := list -}}
{{- $bookie := include "bindery.workload" (dict "root" . "component" "bookie") | fromYaml -}}
{{- with include "bindery.memoryLimit" $bookie -}}
{{- $limit := int64 . -}}
{{- $size := include "bindery.bytes" (dig "memorySizeMax" "384Mi" $bookie.config) | int64 -}}
{{- $room := include "bindery.bytes" "64Mi" | int64 -}}
{{- if gt (add $size $room) $limit -}}
{{- $problems = append $problems (printf "bookie.config.memorySizeMax (%d bytes) is above bookie.resources.limits.memory (%d bytes) less 64Mi: the kernel would kill the bookie under load; raise the limit, or lower memorySizeMax to %d" $size $limit (sub $limit $room)) -}}
{{- end -}}
{{- $inMemory := include "bindery.bookie.memoryVolumes" $ | int64 -}}
{{- if and (gt $inMemory 0) (gt (add $size $room $inMemory) $limit) -}}
{{- $problems = append $problems (printf "bookie.persistence with medium Memory takes up to %d bytes, which count as memory beside bookie.config.memorySizeMax (%d bytes) and 64Mi, and bookie.resources.limits.memory is %d bytes: set the limit to %d or more" $inMemory $size $limit (add $size $room $inMemory)) -}}
{{- end -}}
{{- end -}}
{{- $broker := include "bindery.workload" (dict "root" . "component" "broker") | fromYaml -}}
{{- with include "bindery.memoryLimit" $broker -}}
{{- $size := include "bindery.bytes" (dig "inFlightBytesMax" "256Mi" $broker.config) | int64 -}}
{{- if gt (mul 2 $size) (int64 .) -}}
{{- $problems = append $problems (printf "broker.config.inFlightBytesMax (%d bytes) is above half of broker.resources.limits.memory (%d bytes): the kernel would kill the broker under load; raise the limit to %d, or lower inFlightBytesMax" $size (int64 .) (mul 2 $size)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.zookeeper.enabled -}}
{{- $heap := include "bindery.bytes" .Values.zookeeper.heapSize | int64 -}}
{{- with include "bindery.memoryLimit" (include "bindery.workload" (dict "root" . "component" "zookeeper") | fromYaml) -}}
{{- if ge $heap (int64 .) -}}
{{- $problems = append $problems (printf "zookeeper.heapSize (%d bytes) leaves Java no room within zookeeper.resources.limits.memory (%d bytes): lower the heap or raise the limit by 100Mi" $heap (int64 .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* Maximum size in bytes of a bookie's volumes in memory. */}}
{{- define "bindery.bookie.memoryVolumes" -}}
{{- $sum := 0 -}}
{{- if not .Values.bookie.persistence.enabled -}}
{{- range $name, $claim := include "bindery.bookie.claims" . | fromYaml -}}
{{- if eq $claim.medium "Memory" -}}{{- $sum = add $sum (include "bindery.bytes" $claim.size | int64) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $sum }}
{{- end }}

{{/* Termination grace periods that are too short: Kubernetes must not send SIGKILL before an orderly stop has ended.
Times are in seconds.

| service | preStop | setting, and its default       | margin | for                                           |
|---------|--------:|--------------------------------|-------:|-----------------------------------------------|
| bookie  |      10 | config.server.drainTimeoutS, 5 |     15 | the flush of the write caches                 |
| broker  |       3 | config.stopTimeoutS, 30        |      2 | the end of sessions                           |
| auditor |       3 | config.stopTimeoutS, 10        |      2 | the same                                      |
*/}}
{{- define "bindery.problems.stopping" -}}
{{- $problems := list -}}
{{- $drain := dig "server" "drainTimeoutS" nil .Values.bookie.config -}}
{{- range $component, $stop := dict
  "bookie" (dict "setting" "server.drainTimeoutS" "seconds" (kindIs "invalid" $drain | ternary 5 $drain) "beside" 25)
  "broker" (dict "setting" "stopTimeoutS" "seconds" (.Values.broker.config.stopTimeoutS | default 30) "beside" 5)
  "auditor" (dict "setting" "stopTimeoutS" "seconds" (.Values.auditor.config.stopTimeoutS | default 10) "beside" 5)
-}}
{{- $grace := int (include "bindery.workload" (dict "root" $ "component" $component) | fromYaml).terminationGracePeriodSeconds -}}
{{- $least := add (float64 $stop.seconds | ceil | int) $stop.beside | int -}}
{{- if lt $grace $least -}}
{{- $problems = append $problems (printf "%s.terminationGracePeriodSeconds (%d) is less than its preStop hook and an orderly stop take (%s.config.%s is %v): set it to %d or more" $component $grace $component $stop.setting $stop.seconds $least) -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{- define "bindery.problems.broker" -}}
{{- $problems := list -}}
{{- $broker := .Values.broker -}}
{{- $replicas := int $broker.replicas -}}
{{- if $broker.autoscaling.enabled -}}
{{- $replicas = int $broker.autoscaling.minReplicas -}}
{{- if gt $replicas (int $broker.autoscaling.maxReplicas) -}}
{{- $problems = append $problems (printf "broker.autoscaling.minReplicas (%d) is more than maxReplicas (%d): swap them" $replicas (int $broker.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $broker.pdb.enabled (gt $replicas 1) (ge (int $broker.pdb.maxUnavailable) $replicas) -}}
{{- $problems = append $problems (printf "broker.pdb.maxUnavailable (%d) lets a node drain take all %d brokers: set it to %d or less" (int $broker.pdb.maxUnavailable) $replicas (sub $replicas 1)) -}}
{{- end -}}
{{- if and $broker.autoscaling.enabled (not (dig "requests" "cpu" "" (default dict (include "bindery.workload" (dict "root" . "component" "broker") | fromYaml).resources))) -}}
{{- $problems = append $problems "broker.autoscaling.enabled is true and broker.resources.requests.cpu is not set: the target is a percentage of the request; set it, for example to 200m" -}}
{{- end -}}
{{- if and $broker.ingress.enabled (not $broker.ingress.hosts) -}}
{{- $problems = append $problems "broker.ingress.enabled is true and broker.ingress.hosts is empty: name a host, as in broker.ingress.hosts={bindery.example.org}" -}}
{{- end -}}
{{- if and $broker.httpRoute.enabled (not $broker.httpRoute.parentRefs) -}}
{{- $problems = append $problems "broker.httpRoute.enabled is true and broker.httpRoute.parentRefs is empty: name a Gateway, as in broker.httpRoute.parentRefs[0].name=my-gateway" -}}
{{- end -}}
{{- $strategy := default dict (default dict (include "bindery.workload" (dict "root" . "component" "broker") | fromYaml).updateStrategy).rollingUpdate -}}
{{- if and (has (get $strategy "maxSurge" | toString) (list "0" "0%")) (has (get $strategy "maxUnavailable" | toString) (list "0" "0%")) -}}
{{- $problems = append $problems "broker.updateStrategy.rollingUpdate has maxSurge 0 and maxUnavailable 0, and no broker could be replaced: set one of them to 1" -}}
{{- end -}}
{{- if and $broker.service.nodePort (eq $broker.service.type "ClusterIP") -}}
{{- $problems = append $problems "broker.service.nodePort is set while broker.service.type is ClusterIP: set the type to NodePort or LoadBalancer, or remove the port" -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* The names in a workload's `env`, and "*" if `extraEnvFrom` or `podTemplate.merge` is set, whose variables are not
examined. Takes (dict "root" $ "component" "broker"); use with fromYamlArray. */}}
{{- define "bindery.variables" -}}
{{- $w := include "bindery.workload" . | fromYaml -}}
{{- $names := list -}}
{{- range $w.env -}}{{- $names = append $names .name -}}{{- end -}}
{{- if or $w.extraEnvFrom $w.podTemplate.merge -}}{{- $names = append $names "*" -}}{{- end -}}
{{- toYaml $names }}
{{- end }}

{{/* Services without credentials although the bookies require them. Credentials may be set in `config` or `env`; a workload
that may get them from `extraEnvFrom` or `podTemplate.merge` is accepted. */}}
{{- define "bindery.problems.access" -}}
{{- $problems := list -}}
{{- $bookie := include "bindery.config" (dict "root" . "component" "bookie") | fromYaml -}}
{{- $provider := dig "auth" "provider" "none" $bookie | default "none" -}}
{{- $needed := dict -}}
{{- if eq $provider "token" -}}
{{- $_ := set $needed "tokenFile" "bookie.config.auth.provider is token" -}}
{{- end -}}
{{- if dig "tls" "required" false $bookie -}}
{{- $_ := set $needed "caFile" "bookie.config.tls.required is true" -}}
{{- end -}}
{{- if eq $provider "certificate" -}}
{{- $_ := set $needed "caFile" "bookie.config.auth.provider is certificate" -}}
{{- $_ := set $needed "certificateFile" "bookie.config.auth.provider is certificate" -}}
{{- end -}}
{{- range $service := list "broker" "auditor" -}}
{{- $client := (include "bindery.config" (dict "root" $ "component" $service) | fromYaml).client | default dict -}}
{{- $names := include "bindery.variables" (dict "root" $ "component" $service) | fromYamlArray -}}
{{- range $key, $why := $needed -}}
{{- $variable := printf "CLIENT_%s" (snakecase $key | upper) -}}
{{- if not (or (get $client $key) (has "*" $names) (has (printf "%s_%s" (upper $service) $variable) $names)) -}}
{{- $problems = append $problems (printf "%s and %s.config.client.%s is empty: bookies would refuse it; set it to a file that %s.extraVolumes mounts (docs/kubernetes.md#security has an example; toolbox, helmTest and audit take BINDERY_%s in their env)" $why $service $key $service $variable) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $service := list "bookie" "auditor" -}}
{{- $admin := default dict (include "bindery.config" (dict "root" $ "component" $service) | fromYaml).admin -}}
{{- if and $.Values.adminToken.secretName (or $admin.tokenFile $admin.keysFile $admin.audience) -}}
{{- $problems = append $problems (printf "adminToken.secretName and %s.config.admin are both set, and only one can apply: remove %s.config.admin, or adminToken.secretName" $service $service) -}}
{{- end -}}
{{- end -}}
{{- $names := include "bindery.variables" (dict "root" . "component" "bookie") | fromYamlArray -}}
{{- $isSet := or (dig "tls" "caFile" "" $bookie) (dig "repair" "caFile" "" $bookie) -}}
{{- range list "*" "BOOKIE_TLS_CA_FILE" "BOOKIE_REPAIR_CA_FILE" -}}{{- $isSet = or $isSet (has . $names) -}}{{- end -}}
{{- if and (hasKey $needed "caFile") (not $isSet) -}}
{{- $problems = append $problems (printf "%s, and bookie.config.tls.caFile and bookie.config.repair.caFile are empty: bookies could not copy lost entries from one another; set the first to a file that bookie.extraVolumes mounts" (get $needed "caFile")) -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* The secure form without the Secrets that it needs, and TLS with which Kubernetes or Prometheus cannot connect. */}}
{{- define "bindery.problems.security" -}}
{{- $problems := list -}}
{{- $security := .Values.security -}}
{{- $tls := list -}}
{{- range $component := list "bookie" "broker" "auditor" -}}
{{- $context := dict "root" $ "component" $component -}}
{{- if eq (include "bindery.scheme" $context) "https" -}}
{{- $tls = append $tls $component -}}
{{- $w := include "bindery.workload" $context | fromYaml -}}
{{- $required := eq (dig "http" "tls" "clientCertificates" "none" (include "bindery.config" $context | fromYaml)) "required" -}}
{{- if and $required (not (and $w.startupProbe $w.livenessProbe $w.readinessProbe)) -}}
{{- $problems = append $problems (printf "%s.config.http.tls.clientCertificates is required, and Kubernetes has no certificate for the probes: set it to optional, or replace startupProbe, livenessProbe and readinessProbe of %s" $component $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled (dig "auth" "metrics" false (include "bindery.config" (dict "root" . "component" "broker") | fromYaml)) (not .Values.metrics.podMonitor.authorization) -}}
{{- $problems = append $problems "broker.config.auth.metrics is true, and metrics.podMonitor.authorization is empty: brokers would refuse the scrapes; name a Secret with a token in it" -}}
{{- end -}}
{{- if and $tls .Values.metrics.podMonitor.enabled (not $security.enabled) (not .Values.metrics.podMonitor.tlsConfig) -}}
{{- $problems = append $problems (printf "config.http.tls is set for %s, and metrics.podMonitor.tlsConfig is empty: Prometheus would not trust the certificates; name the CA and a serverName in it" (join ", " $tls)) -}}
{{- end -}}
{{- if $security.enabled -}}
{{- range $kind := list "certificates" "credentials" -}}
{{- $values := get $security $kind -}}
{{- range $identity := include "bindery.security.identities" $ | fromJsonArray -}}
{{- if and (eq $values.source "secrets") (not (get $values.secretNames $identity)) -}}
{{- $problems = append $problems (printf "security.%s.source is secrets, and security.%s.secretNames.%s is empty: name an existing Secret, or use the source job" $kind $kind $identity) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $security.superUserRoles -}}
{{- $problems = append $problems "security.superUserRoles is empty: no client could create tenants or grant permissions; set it to [admin], or to the roles of your administrators" -}}
{{- end -}}
{{- range $security.superUserRoles -}}
{{- if or (contains "," .) (has . (list "bookie" "broker" "auditor" "*")) -}}
{{- $problems = append $problems (printf "security.superUserRoles contains %q: a role is a name without commas, other than those of the services (bookie, broker, auditor) and *" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{- define "bindery.problems.backup" -}}
{{- $problems := list -}}
{{- $backup := .Values.backup -}}
{{- if and $backup.enabled (not $backup.persistence.enabled) (not $backup.upload.secretName) -}}
{{- $problems = append $problems "backup.persistence.enabled is false and backup.upload.secretName is empty: every backup would be deleted with its pod; set backup.persistence.enabled to true, or name a Secret with the url of a store" -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{- define "bindery.problems.audit" -}}
{{- $problems := list -}}
{{- $audit := .Values.audit -}}
{{- $least := include "bindery.bytes" "512Mi" | int64 -}}
{{- $heap := include "bindery.bytes" $audit.heapSize | int64 -}}
{{- if lt $heap $least -}}
{{- $problems = append $problems (printf "audit.heapSize (%v) is less than Spark requires: set it to 512Mi or more" $audit.heapSize) -}}
{{- end -}}
{{- if lt (include "bindery.bytes" $audit.executors.heapSize | int64) $least -}}
{{- $problems = append $problems (printf "audit.executors.heapSize (%v) is less than Spark requires: set it to 512Mi or more" $audit.executors.heapSize) -}}
{{- end -}}
{{- with include "bindery.memoryLimit" (include "bindery.workload" (dict "root" . "component" "audit") | fromYaml) -}}
{{- if ge (add $heap (include "bindery.bytes" "256Mi")) (int64 .) -}}
{{- $problems = append $problems (printf "audit.heapSize (%d bytes) leaves Java and Python no room within audit.resources.limits.memory (%d bytes): lower the heap or raise the limit by 512Mi" $heap (int64 .)) -}}
{{- end -}}
{{- end -}}
{{- $w := include "bindery.workload" (dict "root" . "component" "audit") | fromYaml -}}
{{- if and $audit.enabled $audit.executors.enabled (not $w.serviceAccount.create) (not $w.serviceAccount.name) -}}
{{- $problems = append $problems "audit.executors.enabled is true, audit.serviceAccount.create is false and audit.serviceAccount.name is empty: every pod of the namespace that has no account of its own would get permission to create pods; set audit.serviceAccount.name to an existing account, or create to true" -}}
{{- end -}}
{{- if and $audit.enabled $audit.executors.enabled -}}
{{- $account := include "bindery.serviceAccountName" (dict "root" . "component" "audit-executor") -}}
{{- if eq $account (include "bindery.serviceAccountName" (dict "root" . "component" "audit")) -}}
{{- $problems = append $problems (printf "executors of audits would have the account %q, which may create pods because it is the driver's: set audit.executors.serviceAccount.name to another account, or its create to true" $account) -}}
{{- end -}}
{{- if and $audit.executors.admissionPolicy.enabled (semverCompare "<1.30.0-0" .Capabilities.KubeVersion.Version) -}}
{{- $problems = append $problems (printf "audit.executors.admissionPolicy.enabled needs Kubernetes 1.30, and this is %s: set it to false" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- with dig "limits" "cpu" "" (default dict $w.resources) -}}
{{- if and $audit.enabled $audit.executors.enabled (gt (include "bindery.cpus" $audit.executors.requestCpu | float64) (include "bindery.cpus" . | float64)) -}}
{{- $problems = append $problems (printf "audit.executors.requestCpu (%v) is above audit.resources.limits.cpu (%v), which holds for executors, too: Kubernetes refuses such a pod; raise the limit or lower the request" $audit.executors.requestCpu .) -}}
{{- end -}}
{{- end -}}
{{- if and $audit.executors.enabled (not $audit.persistence.enabled) -}}
{{- $problems = append $problems "audit.executors.enabled is true and audit.persistence.enabled is false: driver and executors share the run's files by the claim; set audit.persistence.enabled to true" -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* Existing objects in the cluster that cannot be changed to what the values require. `helm template` cannot check this. */}}
{{- define "bindery.problems.installed" -}}
{{- $problems := list -}}
{{- $fullname := include "bindery.fullname" . -}}
{{- $namespace := .Release.Namespace -}}
{{- range (lookup "apps/v1" "StatefulSet" $namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- if and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq (get $labels "app.kubernetes.io/component") "bookie") (ne .metadata.name (printf "%s-bookie" $fullname)) -}}
{{- $problems = append $problems (printf "this release's bookies are called %s, and would now be called %s-bookie: this would start new, empty bookies and leave the entries behind; set nameOverride and fullnameOverride back to what they were" .metadata.name $fullname) -}}
{{- end -}}
{{- $called := get (default dict .spec.selector.matchLabels) "app.kubernetes.io/name" -}}
{{- if and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (ne $called (include "bindery.name" $)) (eq (get $labels "app.kubernetes.io/part-of") "bindery") -}}
{{- $problems = append $problems (printf "%s was installed with the name %q, which its selector and its pods carry, and Kubernetes cannot change that to %q; set nameOverride back to what it was" .metadata.name $called (include "bindery.name" $)) -}}
{{- end -}}
{{- end -}}
{{- $bookies := lookup "apps/v1" "StatefulSet" $namespace (printf "%s-bookie" $fullname) -}}
{{- if $bookies -}}
{{- range (first $bookies.spec.template.spec.containers).env -}}
{{- if and (eq .name "BOOKIE_ZOOKEEPER") .value -}}
{{- $before := regexFind "/.*$" .value -}}
{{- $chroot := default "" $.Values.zookeeper.chroot -}}
{{- if ne $before $chroot -}}
{{- $problems = append $problems (printf "zookeeper.chroot was %q and cannot become %q: the metadata of all ledgers is there, and the bookies would refuse another cluster; set it back" $before $chroot) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $wanted := .Values.bookie.persistence.enabled | ternary (include "bindery.bookie.claims" . | fromYaml) dict -}}
{{- $problems = concat $problems (include "bindery.problems.claims" (dict "existing" $bookies "wanted" $wanted "values" "bookie.persistence" "policy" .Values.bookie.podManagementPolicy) | fromYamlArray) -}}
{{- end -}}
{{- if .Values.zookeeper.enabled -}}
{{- $replicas := int .Values.zookeeper.replicas -}}
{{- $servers := lookup "apps/v1" "StatefulSet" $namespace (printf "%s-zookeeper" $fullname) -}}
{{- if $servers -}}
{{- $existing := int $servers.spec.replicas -}}
{{- if ne $existing $replicas -}}
{{- $problems = append $problems (printf "zookeeper.replicas was %d and cannot become %d: servers without data could outvote those that have it, and every ledger would be lost; keep %d, or restore a backup into a new release (`bindery cluster backup`)" $existing $replicas $existing) -}}
{{- end -}}
{{- $wanted := .Values.zookeeper.persistence.enabled | ternary (dict "data" .Values.zookeeper.persistence) dict -}}
{{- $problems = concat $problems (include "bindery.problems.claims" (dict "existing" $servers "wanted" $wanted "values" "zookeeper.persistence" "policy" .Values.zookeeper.podManagementPolicy) | fromYamlArray) -}}
{{- else if .Values.zookeeper.persistence.enabled -}}
{{- $claims := 0 -}}
{{- range (lookup "v1" "PersistentVolumeClaim" $namespace "").items -}}
{{- if hasPrefix (printf "data-%s-zookeeper-" $fullname) .metadata.name -}}{{- $claims = add1 $claims -}}{{- end -}}
{{- end -}}
{{- if and (gt (int $claims) 0) (ne (int $claims) $replicas) -}}
{{- $problems = append $problems (printf "volume claims data-%s-zookeeper-... of %d servers exist, and zookeeper.replicas is %d: servers without data could outvote those that have it; set zookeeper.replicas to %d, or delete the claims to start with empty servers" $fullname (int $claims) $replicas (int $claims)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}

{{/* Changes of a StatefulSet that Kubernetes refuses. Takes a dict:
  existing  the existing object in the cluster
  wanted    its claims by name, according to the values; empty if persistence is disabled
  values    the path of those values, for the messages
  policy    its podManagementPolicy according to the values
*/}}
{{- define "bindery.problems.claims" -}}
{{- $problems := list -}}
{{- $existing := dict -}}
{{- range .existing.spec.volumeClaimTemplates -}}
{{- $_ := set $existing .metadata.name (dict "size" .spec.resources.requests.storage "storageClass" (default "" .spec.storageClassName) "accessModes" .spec.accessModes "labels" (default dict .metadata.labels) "annotations" (default dict .metadata.annotations)) -}}
{{- end -}}
{{- if ne .existing.spec.podManagementPolicy .policy -}}
{{- $problems = append $problems (printf "podManagementPolicy of %s was %s and cannot become %s; set it back" .existing.metadata.name .existing.spec.podManagementPolicy .policy) -}}
{{- end -}}
{{- $names := keys $existing | sortAlpha | join " and " | default "none" -}}
{{- $wantedNames := keys .wanted | sortAlpha | join " and " | default "none" -}}
{{- if ne $names $wantedNames -}}
{{- $problems = append $problems (printf "%s was set up with the volume claims %s and cannot change to %s: Kubernetes refuses it, and the data would be elsewhere; set enabled and common.enabled back to what they were" .values $names $wantedNames) -}}
{{- else -}}
{{- $object := .existing.metadata.name -}}
{{- $values := .values -}}
{{- range $name, $claim := .wanted -}}
{{- $before := get $existing $name -}}
{{- if ne (include "bindery.bytes" $before.size) (include "bindery.bytes" $claim.size) -}}
{{- $problems = append $problems (printf "the size of %s's claim %q was %s and is now %s: Kubernetes cannot change it in a StatefulSet; enlarge the claims %s-%s-... themselves, then `kubectl delete statefulset %s --cascade=orphan`, then upgrade with the new size" $values $name $before.size $claim.size $name $object $object) -}}
{{- end -}}
{{- $standard := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- $labels := default dict $claim.labels -}}
{{- range $standard -}}{{- $labels = omit $labels . -}}{{- $_ := unset $before.labels . -}}{{- end -}}
{{- range $key, $now := dict "accessModes" $claim.accessModes "labels" $labels "annotations" (default dict $claim.annotations) -}}
{{- if ne (get $before $key | toJson) ($now | toJson) -}}
{{- $problems = append $problems (printf "%s of %s's claim %q were %s and are now %s: Kubernetes cannot change them in a StatefulSet; set them back, or `kubectl delete statefulset %s --cascade=orphan` and upgrade: only new claims get them" $key $values $name (get $before $key | toJson) ($now | toJson) $object) -}}
{{- end -}}
{{- end -}}
{{- if ne $before.storageClass (default "" $claim.storageClass) -}}
{{- $problems = append $problems (printf "the storage class of %s's claim %q was %q and is now %q: Kubernetes cannot change it, and existing claims keep theirs; set it back, or `kubectl delete statefulset %s --cascade=orphan` and upgrade: only new claims get the new class" $values $name $before.storageClass $claim.storageClass $object) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $problems }}
{{- end }}
